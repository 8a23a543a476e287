"""A digest: the sorted 32-bit prints of a peer's chunks in memory, for one shard of the addresses, as one key's value.

    0   2  version: 1
    2   2  zero
    4   4  count of prints in this digest
    8   4  count of chunks in the shard, which may be more
    12  -  zlib of four planes: byte 0 of the gap before each print, then byte 1 of each, byte 2, byte 3

All little-endian.  The print of an address is its bytes 4 to 7, its shard the first six bits.  The planes of the gaps
take 2.5 to 3.4 bytes a print; the prints as they are, 4.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.errors import InvalidRequest

VERSION = 1
DIGEST_BYTES_MAX = 64 << 10
PRINTS_MAX = 16_000
"""Prints in one digest: even random planes then stay under DIGEST_BYTES_MAX. Chunks beyond it are not reported."""
_HEADER = struct.Struct("<HHII")
_LEVEL = 1

Prints = npt.NDArray[np.uint32]
Spots = npt.NDArray[np.uint64]
"""Shard (6 bits) and print (32 bits) of addresses, as one number: ``shard << 32 | print``."""


def encode(prints: Prints) -> bytes:
    """Encodes sorted prints as a digest, at most DIGEST_BYTES_MAX; empty for none."""
    if not len(prints):
        return b""
    told = prints[:PRINTS_MAX].astype("<u4", copy=False)
    gaps = np.diff(told, prepend=np.uint32(0)).astype("<u4", copy=False)
    planes = gaps.view(np.uint8).reshape(-1, 4).T.tobytes()
    return _HEADER.pack(VERSION, 0, len(told), len(prints)) + zlib.compress(planes, _LEVEL)


def decode(value: bytes) -> Prints:
    """Decodes a digest. Raises InvalidRequest for anything else, before it takes more memory than a digest may."""
    if not _HEADER.size <= len(value) <= DIGEST_BYTES_MAX:
        raise InvalidRequest(f"a digest has {len(value)} bytes: expected {_HEADER.size} to {DIGEST_BYTES_MAX}")
    version, _, count, _ = _HEADER.unpack_from(value)
    if version != VERSION or not 0 < count <= PRINTS_MAX:
        raise InvalidRequest(
            f"a digest of version {version} has {count} prints: expected version 1, at most {PRINTS_MAX}"
        )
    inflating = zlib.decompressobj()
    try:
        planes = inflating.decompress(memoryview(value)[_HEADER.size :], 4 * count + 1)
    except zlib.error as cause:
        raise InvalidRequest(f"a digest cannot be read: {cause}") from cause
    if len(planes) != 4 * count:
        raise InvalidRequest(f"a digest has {len(planes)} bytes of gaps: expected {4 * count}")
    gaps = np.frombuffer(planes, np.uint8).reshape(4, count).T.copy().view("<u4")[:, 0]
    prints = np.cumsum(gaps, dtype=np.uint64)
    if int(prints[-1]) >> 32:
        raise InvalidRequest("the prints of a digest are over 32 bits")
    return prints.astype(np.uint32)


def spots_of(addresses: Sequence[Address]) -> Spots:
    """Returns shard and print of each address."""
    raw = np.frombuffer(b"".join(addresses), np.uint8).reshape(-1, ADDRESS_BYTES)
    shards: Spots = (raw[:, 0] >> 2).astype(np.uint64)
    prints: Spots = raw.view("<u4")[:, 1].astype(np.uint64)
    return shards << np.uint64(32) | prints
