"""Chunks for whoever verifies them at the other end: open files, or the bytes of whole files, header and all.

Kept apart from reading because nothing but the header is verified here; a damaged section is found by the client,
who then reads that chunk the long way, where it is set aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.address import Chain
from kvstore.buffers import Borrowed
from kvstore.errors import KVStoreError
from kvstore.format.header import expected_chunk
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import DeadlinePassed, Lanes
from kvstore.node.reading import Reading
from kvstore.root.posix import PosixReader


def copying(
    chunks: Chunks,
    lanes: Lanes,
    counters: Counters,
    chain: Chain,
    indexes: Sequence[int],
    into: Callable[[int], memoryview],
) -> Reading:
    """Begins to read the whole files of chunks into ``into(index)``, which has the size of the file."""

    def read(at: int, borrowed: Borrowed) -> bool:
        expected = expected_chunk(chain, indexes[at])
        opened = chunks.open(expected)
        if opened is None:
            return False
        reader, _ = opened
        with reader:
            memory = into(indexes[at])
            if reader.read([memory], 0, borrowed) != len(memory):
                counters.add("miss_unreadable")
                return False
        counters.add_read(expected.payload_bytes)
        return True

    return Reading(lanes, counters, len(indexes), read)


def open_files(
    chunks: Chunks, lanes: Lanes, counters: Counters, chain: Chain, indexes: Sequence[int], deadline: Deadline
) -> list[PosixReader]:
    """The open files of chunks, the caller's to close, up to the first that is missing; their headers are verified."""
    lock = threading.Lock()
    opened: dict[int, PosixReader] = {}
    given_up = False

    def work(at: int) -> bool:
        try:
            found = chunks.open(expected_chunk(chain, indexes[at]))
        except KVStoreError:
            counters.add("miss_unreadable")
            return False
        if found is None:
            return False
        reader = found[0]
        with lock:
            # Opened after the caller gave up: nobody else would close it.
            keep = not given_up and isinstance(reader, PosixReader)
            if keep and isinstance(reader, PosixReader):
                opened[at] = reader
        if not keep:
            reader.close()
        return keep

    try:
        lanes.each(len(indexes), work, deadline)
    except DeadlinePassed:
        counters.add("miss_deadline")
    except KVStoreError:
        counters.add("miss_shed")
    finally:
        with lock:
            given_up = True
    leading: list[PosixReader] = []
    while len(leading) in opened:
        leading.append(opened.pop(len(leading)))
    for reader in opened.values():
        reader.close()
    return leading
