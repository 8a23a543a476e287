"""The checksums that travel with a run: one for each plane of chunks, or each block, few enough to cost nothing."""

from __future__ import annotations

from kvstore.buffers import Pieces, Planes
from kvstore.format.header import checksum


def plane_sums(planes: Planes, first: int, count: int) -> tuple[int, ...]:
    """Returns the XXH3-64 of each plane's part of ``count`` chunks from index ``first`` on, in order."""
    return tuple(checksum(plane.data) for row in planes.strided(first, count) for plane in row)


def block_sums(blocks: Pieces) -> tuple[int, ...]:
    """Returns the XXH3-64 of each block, in order."""
    return tuple(map(checksum, blocks))
