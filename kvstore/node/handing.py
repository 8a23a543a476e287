"""Chunks for whoever verifies them at the other end: open files, or the bytes of whole files, header and all.

Kept apart from reading because nothing but the header is verified here; a damaged section is found by the client,
who then reads that chunk the long way, where it is set aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.buffers import Borrowed
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format.header import Damaged
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import DeadlinePassed, Lanes
from kvstore.node.reading import Reading
from kvstore.node.wanted import Wanted, expected_of
from kvstore.root.posix_reader import PosixReader


def copying(
    chunks: Chunks,
    lanes: Lanes,
    counters: Counters,
    wanted: Wanted,
    indexes: Sequence[int],
    into: Callable[[int], memoryview],
    *,
    stop_at_miss: bool = True,
) -> Reading:
    """Begins to read the whole files of chunks into ``into(index)``, which has the size of the file."""

    def read(at: int, borrowed: Borrowed) -> bool:
        expected = expected_of(wanted, indexes[at])
        opened = chunks.open(expected)
        if opened is None:
            return False
        reader, _ = opened
        with chunks.noted(expected), reader, counters.timed("root", "read") as timed:
            memory = into(indexes[at])
            timed.size_bytes = len(memory)
            try:
                if reader.read([memory], 0, borrowed) != len(memory):
                    counters.add(NodeCount.MISS_UNREADABLE)
                    return False
            except Damaged as damaged:  # of an encoded file, which is verified as it is decoded
                borrowed.check()
                chunks.set_aside(expected, damaged.damage)
                return False
        counters.add_read(expected.payload_bytes)
        return True

    return Reading(lanes, counters, len(indexes), read, stop_at_miss)


def open_files(
    chunks: Chunks, lanes: Lanes, counters: Counters, wanted: Wanted, indexes: Sequence[int], deadline: Deadline
) -> list[PosixReader]:
    """The open files of chunks, the caller's to close, up to the first that is missing; their headers are verified."""
    opened = _opened(chunks, lanes, counters, wanted, indexes, deadline, stop_at_miss=True)
    leading: list[PosixReader] = []
    while len(leading) in opened:
        leading.append(opened.pop(len(leading)))
    for reader in opened.values():
        reader.close()
    return leading


def open_each(
    chunks: Chunks, lanes: Lanes, counters: Counters, wanted: Wanted, indexes: Sequence[int], deadline: Deadline
) -> list[PosixReader | None]:
    """The same of each by itself; None for those that are missing."""
    opened = _opened(chunks, lanes, counters, wanted, indexes, deadline, stop_at_miss=False)
    return [opened.get(at) for at in range(len(indexes))]


def _opened(
    chunks: Chunks,
    lanes: Lanes,
    counters: Counters,
    wanted: Wanted,
    indexes: Sequence[int],
    deadline: Deadline,
    *,
    stop_at_miss: bool,
) -> dict[int, PosixReader]:
    """Open files by their place among ``indexes``."""
    lock = threading.Lock()
    opened: dict[int, PosixReader] = {}
    given_up = False

    def work(at: int) -> bool:
        try:
            found = chunks.open_file(expected_of(wanted, indexes[at]))
        except KVStoreError:
            counters.add(NodeCount.MISS_UNREADABLE)
            return not stop_at_miss
        if found is None:
            return not stop_at_miss
        with lock:
            # Opened after the caller gave up: nobody else would close it.
            keep = not given_up
            if keep:
                opened[at] = found
        if not keep:
            found.close()
        return keep

    try:
        lanes.each(len(indexes), work, deadline)
    except DeadlinePassed:
        counters.add(NodeCount.MISS_DEADLINE)
    except KVStoreError:
        counters.add(NodeCount.MISS_SHED)
    finally:
        with lock:
            given_up = True
    return opened
