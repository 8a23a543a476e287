"""Reads the file of one chunk and verifies it: its header against what is expected, its sections against the header.

A client does the same with open files from a worker.
"""

from __future__ import annotations

from kvstore.buffers import Borrowed, Pieces, cut_evenly
from kvstore.format.checksum import checksum
from kvstore.format.header import Damage, Damaged, Expected, Header, decode_as
from kvstore.node.encoded import Encodings
from kvstore.root.interface import Reader

VERIFY_BYTES = 4 << 20
"""Read and verify in runs of about this size: few system calls, and the bytes are still cached for the checksum."""


def plain(reader: Reader, expected: Expected, encodings: Encodings) -> Reader | None:
    """Returns the file as one of version 1; None if it has neither version, or another size.

    Raises Damaged and NotDecodable for an encoded file.
    """
    if reader.stat.size_bytes == expected.file_bytes:
        return reader  # of version 1: an encoded one never has that size
    return encodings.reader(reader, expected)


def read_verified(reader: Reader, expected: Expected, sections: Pieces, borrowed: Borrowed) -> None:
    """Reads header and payload and verifies both. Raises Damaged."""
    run = max(1, VERIFY_BYTES // max(1, expected.section_bytes))
    raw = bytearray(expected.header_bytes)
    header: Header | None = None
    offset = 0
    for start in range(0, len(sections), run):
        part = sections[start : start + run]
        # Read the header together with the first sections, in one call.
        pieces = part if header else [memoryview(raw), *part]
        offset += fill(reader, pieces, offset, borrowed)
        header = header or decode_as(raw, expected)
        verify(part, header.checksums[start : start + run])


def verify_whole(reader: Reader, expected: Expected) -> None:
    """Verifies a whole chunk without keeping it, in memory for one run. Raises Damaged."""
    header = read_header(reader, expected)
    run = max(1, VERIFY_BYTES // max(1, expected.section_bytes))
    scratch = memoryview(bytearray(min(run, expected.section_count) * expected.section_bytes))
    offset = expected.header_bytes
    for start in range(0, expected.section_count, run):
        count = min(run, expected.section_count - start)
        part = cut_evenly(scratch[: count * expected.section_bytes], expected.section_bytes)
        offset += fill(reader, part, offset, Borrowed())
        verify(part, header.checksums[start : start + count])


def read_whole(reader: Reader, expected: Expected) -> memoryview:
    """Returns the whole file in memory of its own, verified. Raises Damaged."""
    image = memoryview(bytearray(expected.file_bytes))
    sections = cut_evenly(image[expected.header_bytes :], expected.section_bytes)
    read_verified(reader, expected, sections, Borrowed())
    return image.toreadonly()


def read_header(reader: Reader, expected: Expected) -> Header:
    """Reads and verifies the header. Raises Damaged."""
    raw = bytearray(expected.header_bytes)
    fill(reader, [memoryview(raw)], 0, Borrowed())
    return decode_as(raw, expected)


def fill(reader: Reader, pieces: Pieces, offset: int, borrowed: Borrowed) -> int:
    """Reads all of ``pieces``. A short read counts as damage; a file that vanished looks the same, and is no worse."""
    wanted = sum(map(len, pieces))
    if reader.read(pieces, offset, borrowed) != wanted:
        raise Damaged(Damage.SIZE)
    return wanted


def verify(sections: Pieces, sums: tuple[int, ...]) -> None:
    """Raises Damaged if a section has another checksum."""
    # One expression, because this loop holds the GIL that all lanes share.
    if tuple(map(checksum, sections)) != sums:
        raise Damaged(Damage.SECTION_CHECKSUM)
