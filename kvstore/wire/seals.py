"""Seals: a checksum behind what a message says, so that a bit that flips on the way never makes it another prompt.

TCP's checksum of 16 bits lets some damage pass.  In the bytes of a chunk that shows; in the tokens of a put it would
store one prompt's KV under another's address, with all checksums right.  A seal is a protobuf field of type fixed64
that no message declares, so a receiver that does not know it ignores it, and a sender may leave it out.
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
    """The field that says what ``content`` was: its XXH3-64."""
    return _TAG + _SUM.pack(checksum(content))


def is_whole(message: bytes) -> bool | None:
    """Whether a message is what its seal at the end says; None where there is none."""
    at = len(message) - SEAL_BYTES
    if at < 0 or message[at : at + len(_TAG)] != _TAG:
        return None
    return seal(message[:at]) == message[at:]
