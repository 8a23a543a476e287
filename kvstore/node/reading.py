"""Looking for a prefix and reading it: bisection over the chain, and parallel verified reads."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Pieces, Withdrawn
from kvstore.errors import KVStoreError
from kvstore.format.header import expected_chunk
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import DeadlinePassed, Lanes


def matched_count(chunks: Chunks, lanes: Lanes, counters: Counters, chain: Chain, deadline: Deadline) -> int:
    """How many leading chunks are in the store. Errors and a passed deadline end the match where memory ends."""
    known = chunks.known.leading_count(chain.addresses, chunks.quantum())
    if known == len(chain):
        return known
    try:
        return lanes.run(lambda: _bisect(chunks, chain, known), deadline)
    except DeadlinePassed:
        counters.add("miss_deadline")
    except KVStoreError:
        counters.add("miss_unreadable")
    return known


def _bisect(chunks: Chunks, chain: Chain, known: int) -> int:
    """The number of leading chunks present, given that the first ``known`` are.

    An ancestor outlives its descendants, so presence along a chain is a step: O(log n) looks.  The chunk after the
    known ones is looked at first: it decides alone for a prompt nobody has stored, and it is where damage would show.
    """
    present, absent = known, len(chain)

    def is_present(index: int) -> bool:
        return chunks.is_present(expected_chunk(chain, index))

    if not is_present(known):
        return known
    present = known + 1
    if present < absent and is_present(absent - 1):
        present = absent
    while present < absent:
        middle = (present + absent) // 2
        if is_present(middle):
            present = middle + 1
        else:
            absent = middle
    quantum = chunks.quantum()
    for address in chain.addresses[known:present]:
        chunks.known.add(address, quantum, renewed=False)
    return present


def read_chunks(
    lanes: Lanes,
    counters: Counters,
    count: int,
    read: Callable[[int, Borrowed], bool],
    deadline: Deadline,
    stop_at_miss: bool = True,
) -> bytearray:
    """Calls ``read(index, borrowed)`` for 0 to count - 1 on the lanes; one byte per index, 1 where it succeeded.

    Begins no more after a miss, unless told otherwise. Past the deadline the memory is withdrawn: what was read until
    then counts.
    """
    done = bytearray(count)
    borrowed = Borrowed()

    def work(index: int) -> bool:
        try:
            intact = read(index, borrowed)
        except Withdrawn:
            return False
        except KVStoreError:
            counters.add("miss_unreadable")
            return not stop_at_miss
        done[index] = intact
        return intact or not stop_at_miss

    try:
        lanes.each(count, work, deadline)
    except DeadlinePassed:
        borrowed.withdraw()
        counters.add("miss_deadline")
    except KVStoreError:
        counters.add("miss_shed")
    return done


def read_leading(
    chunks: Chunks,
    lanes: Lanes,
    counters: Counters,
    chain: Chain,
    count: int,
    into: Callable[[int], Pieces],
    deadline: Deadline,
) -> int:
    """Reads the first ``count`` chunks of a chain into ``into(index)``; returns how many leading ones are good."""

    def read(index: int, borrowed: Borrowed) -> bool:
        return chunks.read(expected_chunk(chain, index), into(index), borrowed)

    done = read_chunks(lanes, counters, count, read, deadline)
    first_miss = done.find(0)
    return count if first_miss < 0 else first_miss
