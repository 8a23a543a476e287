"""Segments: KV that was computed alone and is reused at another place of a prompt.

``SEGMENTS.md`` next to this file has the rules. ``cache.segments(rope)`` stores and reads them, by public calls of a
cache alone.
"""

from kvstore.segments.gate import Bounds, Measured, Rule, Verdict
from kvstore.segments.rope import Rope, Style, rotate
from kvstore.segments.search import Match
from kvstore.segments.segments import CHUNK_TOKENS, Held, Segments

__all__ = [
    "CHUNK_TOKENS",
    "Bounds",
    "Held",
    "Match",
    "Measured",
    "Rope",
    "Rule",
    "Segments",
    "Style",
    "Verdict",
    "rotate",
]
