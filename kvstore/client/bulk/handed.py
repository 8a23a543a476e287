"""Copying chunks out of the memory, or the open files, of a worker on this host. One copy in all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Laid, Pieces, Sections
from kvstore.client.bulk.given import Given, GivenFiles, GivenSlots
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.links import Link
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damaged
from kvstore.native import is_available
from kvstore.node.chunk_runs import Run
from kvstore.node.counters import Counters
from kvstore.node.images import read_verified, take_images
from kvstore.node.lanes import Deadline, Lanes, group_size
from kvstore.node.reader import Groups, Reading
from kvstore.node.wanted import Wanted, expected_of, image_sizes, mean_bytes
from kvstore.root.interface import LocalFiles, Stat
from kvstore.root.posix_reader import PosixReader


def take_given(
    link: Link, wanted: Wanted, given: Given, sections: Sections, lanes: FileLanes, deadline: Deadline
) -> bytearray:
    """Copies a run of chunks; returns one byte for each, 1 if it is good.

    In a prompt, chunks behind the first bad one count as bad. Files are closed.
    """
    if isinstance(given, GivenFiles):
        return read_files(link, wanted, given, sections, lanes.get(), deadline)
    images, first, count = images_of(link, wanted, given), given.first, given.count
    into = _in_order(sections, first, count)

    def take(start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
        return take_images(wanted, range(first + start, first + stop), images[start:stop], into, borrowed)

    copiers = lanes.copiers()
    groups = Groups(group_size(count, mean_bytes(wanted, first, count), copiers.width), count, take)
    # What is not right is not tried again. The caller does a share, because nothing here waits for a device.
    reading = Reading(copiers, Counters(), count, lambda *_: False, isinstance(wanted, Chain), groups, helps=True)
    try:
        return reading.wait(deadline)
    finally:
        reading.withdraw()  # after an interrupt (Ctrl-C) lanes may still be writing into the caller's memory


def images_of(link: Link, wanted: Wanted, slots: GivenSlots) -> Sequence[memoryview]:
    """Where slots lie in our mapping. Raises InvalidRequest where that is not within it."""
    if link.memory is None:
        raise InvalidRequest("slots came on a connection without memory")
    return link.memory.images(slots.offsets, image_sizes(wanted, range(slots.first, slots.first + slots.count)))


def _in_order(sections: Sections, first: int, count: int) -> Sections:
    """Returns ``sections``, computed in order by one thread, because some sources allocate memory for each call."""
    if isinstance(sections, Laid):
        return sections
    memory = [sections(first + at) for at in range(count)]
    return lambda index: memory[index - first]


def read_files(
    link: Link, wanted: Wanted, given: GivenFiles, sections: Sections, lanes: Lanes, deadline: Deadline
) -> bytearray:
    """Reads one chunk from each file and closes all files; returns one byte for each, 1 if it is good."""
    first, files = given.first, given.files
    if not files:
        return bytearray()
    # Each file has one owner that closes it: the lane that takes it out of this dict, or we at the end.
    left = dict(enumerate(files))
    given.files = []
    memory: Sequence[Pieces] = ()
    never_blocks = False

    def read(at: int, borrowed: Borrowed) -> bool:
        fd = left.pop(at, None)
        if fd is None:
            return False
        with PosixReader(fd, f"of chunk {first + at}, as handed over", Stat(0, 0), never_blocks) as reader:
            try:
                read_verified(reader, expected_of(wanted, first + at), memory[at], borrowed)
            except Damaged:
                return False
        return True

    reading: Reading | None = None
    try:
        never_blocks = all(map(link.never_blocks, files))
        groups = _groups(wanted, first, left, never_blocks, sections, lanes)
        if groups is None:
            # In order and by one thread, because some sources allocate memory for each call.
            memory = [sections(first + at) for at in range(len(files))]
        reading = Reading(lanes, Counters(), len(files), read, isinstance(wanted, Chain), groups)
        return reading.wait(deadline)
    finally:
        if reading is not None:
            reading.withdraw()  # after an interrupt (Ctrl-C) lanes may still be writing into the caller's memory
        _close([fd for at in range(len(files)) if (fd := left.pop(at, None)) is not None])


def _groups(
    wanted: Wanted, first: int, left: dict[int, int], never_blocks: bool, sections: Sections, lanes: Lanes
) -> Groups | None:
    """The native reader for groups of files; None if there is no native code or the memory does not suit it."""
    count = len(left)
    if not is_available() or not isinstance(sections, Laid) or not sections.covers(first, count):
        return None
    run = Run(LocalFiles("", never_blocks, stages=False, direct=False), 0, wanted, first, count, sections)

    def read(start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
        run.items["fd"][start:stop] = [left.pop(at, -1) for at in range(start, stop)]
        return run.read_open(run.first + start, run.first + stop, borrowed)

    return Groups(group_size(count, mean_bytes(wanted, first, count), lanes.width), count, read)


def _close(files: Sequence[int]) -> None:
    for fd in files:
        with suppress(OSError):
            os.close(fd)
