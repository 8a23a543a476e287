"""The addresses of a chain from the native library; ``kvstore.address`` has the definition."""

from __future__ import annotations

import numpy as np

from kvstore.native.library import library

ADDRESS_BYTES = 16


is_available: bool = library is not None


def chained(digest: bytes, parent: bytes, packed: bytes, chunk_bytes: int, first: int) -> list[bytes]:
    """Returns the addresses of the full chunks of ``packed`` (tokens as u32) from chunk ``first`` on, whose parent is
    given.

    ``digest`` is the namespace's. Call it only if ``is_available``.
    """
    assert len(digest) == 32 and len(parent) == ADDRESS_BYTES and chunk_bytes > 0
    count = len(packed) // chunk_bytes - first
    if count <= 0:
        return []
    found = np.empty(count, "V16")
    tokens = np.frombuffer(packed, np.uint8)
    start: int = tokens.__array_interface__["data"][0] + first * chunk_bytes
    library.kv_addresses(digest, parent, start, chunk_bytes, count, found.__array_interface__["data"][0])
    addresses: list[bytes] = found.tolist()
    return addresses
