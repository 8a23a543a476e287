"""Runs with their checksums: chunks by planes, then the XXH3-64 of each plane.

Uses native code if it may, which sums each piece while it is in the cache; both directions are here.
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import Pieces, Planes, address_of
from kvstore.format.header import checksum
from kvstore.native import library as native
from kvstore.transport.channel import Channel

# The page that a worker shares with a client: how many chunks of the current put the arena may forget.


LEDGER_BYTES = 4096
COUNT_BITS = 32


def entry_value(request: int, count: int) -> int:
    """Returns the entry that says that ``count`` leading chunks of the put are released."""
    return request << COUNT_BITS | count


def released_count(entry: int, request: int) -> int:
    """Returns how many leading chunks of a put are released; 0 while the entry is still an older put's."""
    return entry & (1 << COUNT_BITS) - 1 if entry >> COUNT_BITS == request else 0


# The checksums that travel with a run: one for each plane of chunks, or each block, few enough to cost nothing.


def plane_sums(planes: Planes, first: int, count: int) -> tuple[int, ...]:
    """Returns the XXH3-64 of each plane's part of ``count`` chunks from index ``first`` on, in order."""
    return tuple(checksum(plane.data) for row in planes.strided(first, count) for plane in row)


def block_sums(blocks: Pieces) -> tuple[int, ...]:
    """Returns the XXH3-64 of each block, in order."""
    return tuple(map(checksum, blocks))


SUM_BYTES = 8
PARTS_BYTES = 1024
"""XXH3 takes so many bytes at a time: sections of a multiple are summed alone and as a part of their plane."""


def send_run(channel: Channel, planes: Planes, first: int, count: int) -> None:
    """Sends ``count`` chunks from index ``first`` on, plane by plane, and the checksum of each plane."""
    if not channel.moves_natively:
        channel.send_bytes([plane.data for row in planes.strided(first, count) for plane in row])
        channel.send_bytes([np.array(plane_sums(planes, first, count), "<u8").view(np.uint8).data])
        return
    assert planes.covers(first, count) and planes.is_contiguous
    bases = planes.addresses()
    rows, sums = _rows(bases, planes.offset(first), count * planes.section_bytes), np.zeros(len(bases), "<u8")
    gone = ctypes.create_string_buffer(native.SENT_BYTES)
    channel.send_by(partial(native.library.kv_send, rows.ctypes.data, sums.ctypes.data, gone))
    channel.send_bytes([sums.view(np.uint8).data])


def receive_planes(channel: Channel, planes: Pieces) -> bool:
    """Fills ``planes``, or blocks; True if the checksums that follow match them."""
    size_bytes = len(planes[0])
    if channel.moves_natively and size_bytes and all(len(plane) == size_bytes for plane in planes):
        bases = np.fromiter(map(address_of, planes), np.uint64, len(planes))
        return receive_sections(channel, bases, size_bytes, 1) is not None
    channel.receive_into(planes)
    sums = np.array(list(map(checksum, planes)), "<u8")
    return channel.receive(sums.nbytes) == sums.tobytes()


def receive_sections(
    channel: Channel, bases: npt.NDArray[np.uint64], size_bytes: int, parts: int
) -> npt.NDArray[np.uint64] | None:
    """Fills sections at ``bases``, which come as planes of ``parts`` sections each, natively.

    Returns the checksums of the sections; None if those of the planes, which follow, do not match. Sections have a
    multiple of PARTS_BYTES if a plane has several.
    """
    assert parts == 1 or size_bytes % PARTS_BYTES == 0
    rows, sums = _rows(bases, 0, size_bytes), np.zeros(len(bases), "<u8")
    planes = np.zeros(len(bases) // parts, "<u8") if parts > 1 else sums
    came = ctypes.create_string_buffer(native.ROWS_BYTES)
    receive = native.library.kv_receive_rows
    channel.receive_by(partial(receive, rows.ctypes.data, parts, sums.ctypes.data, planes.ctypes.data, came))
    return sums if channel.receive(planes.nbytes) == planes.tobytes() else None


def _rows(bases: npt.NDArray[np.uint64], offset: int, size_bytes: int) -> npt.NDArray[np.void]:
    """Returns the structure for native code: ``size_bytes`` from each base on."""
    rows: npt.NDArray[np.void] = np.zeros(1, native.CHUNK)
    rows["bases"] = bases.ctypes.data
    rows["offset"] = offset
    rows["section_count"] = len(bases)
    rows["section_bytes"] = size_bytes
    return rows
