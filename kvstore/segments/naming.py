"""The namespaces of segments and of verdicts, derived from a model's exact one (SEGMENTS.md, S2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvstore.errors import InvalidRequest
from kvstore.layout import Layout
from kvstore.namespace import Namespace

KIND, SEGMENT = "kv", "segment"
VERDICT = "verdict"


def segments_of(base: Namespace, rope: str, chunk_tokens: int) -> Namespace:
    """The namespace of a model's segments; ``rope`` is the digest of its RoPE settings."""
    attributes = {
        KIND: SEGMENT,
        "keys": "unrotated",
        "context": "bos",
        "rope": rope,
        "base": base.digest.hex(),
    }
    layout = replace(base.layout, chunk_tokens=chunk_tokens)
    name = f"{base.name} (segments of {chunk_tokens})"
    return Namespace.of(name, layout, base.fingerprint, base.tenant, attributes)


def verdicts_of(segments: Namespace) -> Namespace:
    """The namespace of the verdicts on a model's segments: blocks, without a layout of their own."""
    attributes = {KIND: VERDICT, "segments": segments.digest.hex()}
    layout = Layout(1, 1, 1, "int8", 1)
    return Namespace.of(f"{segments.name} verdicts", layout, segments.fingerprint, segments.tenant, attributes)


def check_exact(attributes: Mapping[str, str] | None) -> None:
    """Raises InvalidRequest if a namespace with these attributes would be one of segments or of verdicts (S5)."""
    if isinstance(attributes, Mapping) and attributes.get(KIND) in (SEGMENT, VERDICT):
        raise InvalidRequest(
            f"attribute {KIND}={attributes[KIND]!r} is for segments, whose KV has another context and unrotated keys: "
            "open the model's own namespace and use cache.segments(rope)"
        )
