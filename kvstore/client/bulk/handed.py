"""Reading chunks from files that the worker opened and handed over: one copy in all, as in the worker's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Pieces
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.receiving import fill_verified
from kvstore.client.port import Sections
from kvstore.format.header import Damaged, expected_chunk
from kvstore.native import is_available
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import Lanes
from kvstore.node.reading import Groups, Reading, group_size
from kvstore.node.runs import chain_run
from kvstore.planes import Planes
from kvstore.root.interface import LocalFiles, Stat
from kvstore.root.posix import PosixReader
from kvstore.wire.bulk.frames import FILES_MAX, Kind, decode_span, encode_span

STEP_BYTES = 1 << 20


def read_files(
    link: Link, number: int, chain: Chain, first: int, count: int, sections: Sections, lanes: Lanes, deadline: Deadline
) -> Iterator[tuple[int, bool]]:
    """Reads chunks ``first`` to ``count - 1`` of request ``number``.

    Yields, after each step, how many leading chunks of the prompt are good, and False where the next one is there but
    not right. Raises LinkBroken, LinkLate, BulkRefused.
    """
    runs = [(at, min(FILES_MAX, count - at)) for at in range(first, count, FILES_MAX)]
    link.channel.send(Kind.WANT, number, [encode_span(*runs[0])])
    good = first
    for at, (start, size) in enumerate(runs):
        files = _handed(link, start, size)
        goes_on = len(files) == size and at + 1 < len(runs)
        if goes_on:
            # Opened while these are being read.
            link.channel.send(Kind.WANT, number, [encode_span(*runs[at + 1])])
        read = _read(link, chain, start, files, sections, lanes, deadline)
        good = start + read
        yield good, read == len(files)
        if read < size:
            if goes_on:
                _close(_handed(link, *runs[at + 1]))
            break
    link.channel.send(Kind.READ, number, [encode_span(0, good)])


def _handed(link: Link, start: int, size: int) -> list[int]:
    """The files of the leading chunks of a run, ours to close."""
    _, payload = link.receive(Kind.FILES)
    first, count = decode_span(payload)
    files = link.channel.take_files(count)
    if first != start or count > size:
        _close(files)
        raise link.channel.break_off(f"{count} files from chunk {first} on came: expected {size} from {start} on")
    return files


def _read(
    link: Link, chain: Chain, first: int, files: Sequence[int], sections: Sections, lanes: Lanes, deadline: Deadline
) -> int:
    """Reads one chunk from each file, and closes them all; returns how many leading ones are good."""
    if not files:
        return 0
    # Whoever takes a file out of this closes it: a lane that begins with it, or we at the end.
    left = dict(enumerate(files))
    memory: Sequence[Pieces] = ()
    never_blocks = False

    def read(at: int, borrowed: Borrowed) -> bool:
        fd = left.pop(at, None)
        if fd is None:
            return False
        expected, offset = expected_chunk(chain, first + at), 0
        with PosixReader(fd, f"of chunk {first + at}, as handed over", Stat(0, 0), never_blocks) as reader:

            def fill(pieces: Pieces) -> int:
                nonlocal offset
                count = reader.read(pieces, offset, borrowed)
                if not count:
                    raise _Short
                offset += count
                return count

            try:
                fill_verified(fill, expected, memory[at], STEP_BYTES)
            except (Damaged, _Short):
                return False
        return True

    reading: Reading | None = None
    try:
        never_blocks = all(map(link.never_blocks, files))
        groups = _groups(chain, first, left, never_blocks, sections, lanes)
        if groups is None:
            # Asked for in order and by one thread, because some sources take memory as they are asked.
            memory = [sections(first + at) for at in range(len(files))]
        reading = Reading(lanes, Counters(), len(files), read, groups=groups)
        done = reading.wait(deadline)
    finally:
        if reading is not None:
            reading.withdraw()  # interrupted, perhaps, while lanes write into the caller's memory
        _close([fd for at in range(len(files)) if (fd := left.pop(at, None)) is not None])
    first_miss = done.find(0)
    return len(files) if first_miss < 0 else first_miss


def _groups(
    chain: Chain, first: int, left: dict[int, int], never_blocks: bool, sections: Sections, lanes: Lanes
) -> Groups | None:
    """The same by native code, a group of files at a time; None where there is none, or the memory does not suit it."""
    count = len(left)
    if not is_available() or not isinstance(sections, Planes) or not sections.covers(first, count):
        return None
    opened = LocalFiles("", never_blocks, stages=False, direct=False)
    run = chain_run(opened, 0, chain, first, count, sections)

    def read(start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
        run.items["fd"][start:stop] = [left.pop(at, -1) for at in range(start, stop)]
        return run.read_open(first + start, first + stop, borrowed)

    return Groups(group_size(count, chain.namespace.layout.chunk_bytes, lanes.width), count, read)


class _Short(Exception):
    """A file ended before its chunk did."""


def _close(files: Sequence[int]) -> None:
    for fd in files:
        with suppress(OSError):
            os.close(fd)
