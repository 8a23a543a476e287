"""Chunks that arrive bit by bit, straight in the caller's memory, verified while they are in the cache."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.address import Chain
from kvstore.buffers import Pieces, byte_length, skip
from kvstore.client.bulk.links import Link
from kvstore.format.checksum import checksum
from kvstore.format.header import Damage, Damaged, Expected, decode_as, expected_chunk
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, decode_index


def receive_chunk(link: Link, chain: Chain, index: int, sections: Pieces) -> bool:
    """Reads one chunk of a stream; False where the stream ends before it. Raises Damaged, LinkBroken, BulkRefused."""
    channel, expected = link.channel, expected_chunk(chain, index)
    head = channel.receive_head()
    if head.kind is Kind.REFUSED:
        link.refused(head)
    channel.expect(head, Kind.FILE, Kind.END)
    if head.kind is Kind.END:
        channel.receive(head.length)
        return False
    if head.length != INDEX_BYTES + expected.file_bytes or decode_index(channel.receive(INDEX_BYTES)) != index:
        raise channel.break_off(f"a file of {head.length} bytes came: expected that of chunk {index}")
    try:
        fill_verified(channel.receive_some, expected, sections)
    except Damaged:
        channel.alive = False  # in the middle of a frame
        raise
    return True


def fill_verified(
    fill: Callable[[Pieces], int], expected: Expected, sections: Pieces, step_bytes: int | None = None
) -> None:
    """Reads the file of a chunk into ``sections`` with ``fill``, which writes into pieces and returns how much.

    With ``step_bytes`` it is given that much at a time. Raises Damaged, and what ``fill`` raises.
    """
    raw = bytearray(expected.header_bytes)
    header: Pieces = [memoryview(raw)]
    while header:
        header = skip(header, fill(header))
    sums, size = decode_as(raw, expected).checksums, expected.section_bytes
    step = expected.section_count if step_bytes is None else max(1, step_bytes // size)
    for start in range(0, expected.section_count, step):
        part = sections[start : start + step]
        left: Pieces = part
        wanted, received, verified = byte_length(part), 0, 0
        while received < wanted:
            count = fill(left)
            received += count
            left = skip(left, count)
            whole = received // size
            if tuple(map(checksum, part[verified:whole])) != sums[start + verified : start + whole]:
                raise Damaged(Damage.SECTION_CHECKSUM)
            verified = whole
