"""The addresses of chains from the native library; ``kvstore.address`` has the definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.native.library import library

ADDRESS_BYTES = 16


is_available: bool = library is not None


def chained(digest: bytes, parent: bytes, packed: bytes, chunk_bytes: int, first: int) -> bytes:
    """Returns the addresses of the full chunks of ``packed`` (tokens as u32) from chunk ``first`` on, whose parent is
    given, one after the other.

    ``digest`` is the namespace's. Call it only if ``is_available``.
    """
    assert len(digest) == 32 and len(parent) == ADDRESS_BYTES and chunk_bytes > 0
    count = len(packed) // chunk_bytes - first
    if count <= 0:
        return b""
    found = np.empty(count, "V16")
    tokens = np.frombuffer(packed, np.uint8)
    start: int = tokens.__array_interface__["data"][0] + first * chunk_bytes
    library.kv_addresses(digest, parent, start, chunk_bytes, count, found.__array_interface__["data"][0])
    return found.tobytes()


def chained_each(digest: bytes, packed: bytes, chunk_bytes: int, counts: Sequence[int]) -> bytes:
    """Returns the addresses of several prompts, one after the other; their tokens follow each other in ``packed``.

    Each has as many chunks as ``counts`` says.

    ``digest`` is the namespace's. Call it only if ``is_available``.
    """
    assert len(digest) == 32 and chunk_bytes > 0 and len(packed) == sum(counts) * chunk_bytes
    found, sizes, tokens = np.empty(sum(counts), "V16"), np.array(counts, np.uint64), np.frombuffer(packed, np.uint8)
    at = [each.__array_interface__["data"][0] for each in (tokens, sizes, found)]
    library.kv_addresses_each(digest, at[0], chunk_bytes, at[1], len(counts), at[2])
    return found.tobytes()
