"""Seals: a checksum behind a message's fields, so that a bit that flips on the way never turns it into another prompt.

TCP's checksum of 16 bits misses some damage. Checksums reveal it in the bytes of a chunk. In the tokens of a put it
would store one prompt's KV under another's address, with all checksums right. A seal is a protobuf field of type
fixed64 that no message declares, so a receiver that does not know it ignores it, and a sender may omit it.
"""

from __future__ import annotations

import struct

from kvstore.format.checksum import checksum

SEAL_FIELD = 2047
_TAG = b"\xf9\x7f"
"""Field 2047, wire type 1 (64 bits)."""
_SUM = struct.Struct("<Q")
SEAL_BYTES = len(_TAG) + _SUM.size


def seal(content: bytes) -> bytes:
    """Returns the field that seals ``content``: its XXH3-64."""
    return _TAG + _SUM.pack(checksum(content))


def is_whole(message: bytes) -> bool | None:
    """True if a message matches the seal at its end; None if it has none."""
    at = len(message) - SEAL_BYTES
    if at < 0 or message[at : at + len(_TAG)] != _TAG:
        return None
    return seal(message[:at]) == message[at:]
