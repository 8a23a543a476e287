"""Chunks for clients that verify them: open files, or the bytes of whole files, header and all.

Separate from reading because only the header is verified here. The client finds a damaged section, and reads that chunk
again through the node, which sets it aside.
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
    """Begins to read whole chunk files into ``into(index)``, which has the size of the file."""

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
            except Damaged as damaged:  # an encoded file is verified as it is decoded
                borrowed.check()
                chunks.set_aside(expected, damaged.damage)
                return False
        counters.add_read(expected.payload_bytes)
        return True

    return Reading(lanes, counters, len(indexes), read, stop_at_miss)


def open_files(
    chunks: Chunks, lanes: Lanes, counters: Counters, wanted: Wanted, indexes: Sequence[int], deadline: Deadline
) -> list[PosixReader]:
    """Opens chunk files up to the first that is missing, and verifies their headers. The caller closes them."""
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
    """Opens each chunk file and verifies its header; None for those that are missing. The caller closes them."""
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
    """Opens files; returns them by their position in ``indexes``."""
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
            # The caller gave up before this file was open: nobody else would close it.
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
