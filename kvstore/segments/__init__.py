"""Segments: KV that was computed alone and is reused at another place of a prompt.

``SEGMENTS.md`` beside this file has the rules. This package knows RoPE, tokens and verdicts, and no store;
``kvstore.client.segments`` stores and reads segments (``cache.segments(rope)``).
"""

from kvstore.segments.gate import Bounds, Measured, Rule, Verdict
from kvstore.segments.match import Match
from kvstore.segments.rope import Rope, Style
from kvstore.segments.rotation import rotate, unrotated

__all__ = ["Bounds", "Match", "Measured", "Rope", "Rule", "Style", "Verdict", "rotate", "unrotated"]
