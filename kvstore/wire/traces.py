"""The trace of a request on a bulk connection, which over gRPC travels in metadata.

A field at the front of the message that no message declares, as a seal is one at its end: a receiver that does not know
it ignores it, and a sender may omit it. The seal covers it.
"""

from __future__ import annotations

from google.protobuf.message import Message

from kvstore import tracing
from kvstore.wire.messages import seal

_TAG = b"\xf2\x7f"
"""Field 2046, wire type 2 (a length and so many bytes)."""
TRACE_BYTES_MAX = 127
"""One byte of length. The longest id and span take 124."""


def traced(message: Message) -> bytes:
    """Encodes a request with a seal, and with the trace of the calling thread."""
    said = " ".join(f"{key}={value}" for key, value in _short(tracing.metadata())).encode()
    raw: bytes = message.SerializeToString()
    if said:
        raw = b"".join((_TAG, bytes((len(said),)), said, raw))
    return raw + seal(raw)


def trace_of(message: bytes) -> tracing.Metadata:
    """Returns the trace as metadata; empty if there is none, or if it makes no sense."""
    at = len(_TAG) + 1
    if message[: len(_TAG)] != _TAG or len(message) < at or message[at - 1] > TRACE_BYTES_MAX:
        return ()
    try:
        said = message[at : at + message[at - 1]].decode("ascii")
    except UnicodeDecodeError:
        return ()
    pairs = [word.partition("=") for word in said.split(" ")]
    return tuple((_LONG[key], value) for key, _, value in pairs if value and key in _LONG)


_LONG = {"i": tracing.REQUEST_ID_KEY, "p": tracing.PARENT_KEY}
_SHORT = {key: short for short, key in _LONG.items()}


def _short(metadata: tracing.Metadata) -> list[tuple[str, str]]:
    return [(_SHORT[key], value) for key, value in metadata if key in _SHORT]
