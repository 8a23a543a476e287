"""Parallel verified reads: chunks on their way into the caller's memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Borrowed, Withdrawn
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.node.chunk_runs import SharedRead
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.images import verify_images
from kvstore.node.lanes import Batch, Deadline, DeadlinePassed, Lanes, moved_on
from kvstore.node.runs import Sizes
from kvstore.node.wanted import Wanted, mean_bytes
from kvstore.sections import Sections

GROUP_BYTES_MIN = 1 << 20
GROUP_BYTES_MAX = 32 << 20
"""Some milliseconds of copying. A caller that takes its memory back waits for one of the chunks read from files."""
GROUP_FILES_MAX = 64
LIMIT_PER_GROUP = 32
"""All files of a group are open at once: fewer if the process may open few, so that 16 lanes take half of them."""
GROUPS_PER_LANE = 2
TURN_CHUNKS_MAX = 512
"""Chunks that a lane reads in one call: opening takes a millisecond each on some roots, and a lane that is in one call
for ``stall_s`` counts as hung.
"""


@dataclass(frozen=True, slots=True)
class Groups:
    """Chunks read several at a time, by one call that does not need the GIL."""

    size: int
    """Chunks in a group; the last may have fewer."""
    chunks: int
    read: Callable[[int, int, Borrowed], npt.NDArray[np.bool_]]
    """Reads the chunks from one index up to another; True for those that are right. Raises Withdrawn."""
    turns: SharedRead | None = None
    """Reads the same chunks once, without fixed bounds between the lanes."""


def group_size(chunks: int, chunk_bytes: int, width: int) -> int:
    """Returns how many chunks one call does: enough that Python costs little, few enough that all lanes have work."""
    files_max = files_at_most(GROUP_FILES_MAX, LIMIT_PER_GROUP)
    each = chunks * chunk_bytes // (GROUPS_PER_LANE * width)
    return max(1, min(min(max(each, GROUP_BYTES_MIN), GROUP_BYTES_MAX) // max(1, chunk_bytes), files_max))


def gaps(done: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns the runs of chunks that are not done, each from its first index to the one after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], done, [True])).astype(np.int8)))
    starts: list[int] = edges[::2].tolist()
    ends: list[int] = edges[1::2].tolist()
    return list(zip(starts, ends, strict=True))


def files_at_most(count: int, share: int) -> int:
    """Returns ``count``, or that share of the files that the process may open if it is less; at least 1."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if limit < 0 else max(1, min(limit // share, count))


class Reading:
    """Chunks on their way into the caller's memory; the caller can work between beginning it and waiting."""

    def __init__(
        self,
        lanes: Lanes,
        counters: Counters,
        count: int,
        read: Callable[[int, Borrowed], bool],
        stop_at_miss: bool = True,
        groups: Groups | None = None,
        ended: Callable[[], None] | None = None,
        *,
        helps: bool = False,
    ) -> None:
        """``ended`` is called once nobody reads into the memory any more; it may be called more than once.

        With ``helps`` the thread that waits does a share of the work: for work that never waits for a device.
        """
        self._ended = ended
        self._helps = helps
        self._counters = counters
        self._read = read
        self._stop_at_miss = stop_at_miss
        self._groups = groups
        self._turns = groups.turns if groups is not None else None
        self._borrowed = Borrowed()
        self._done = bytearray(count)
        self._batch: Batch | None = None
        groups_count = -(-groups.chunks // groups.size) if groups is not None else 0
        try:
            if groups is None:
                self._batch = lanes.start(count, self._work, helped=helps)
            elif self._turns is None:
                self._batch = lanes.start(groups_count, self._work_on_group, helped=helps)
            else:
                work = partial(self._work_on_turns, self._turns)
                self._batch = lanes.start(min(groups_count, lanes.width), work, helped=helps)
        except KVStoreError:
            counters.add(NodeCount.MISS_SHED)
        self._running = self._batch.ended if self._batch is not None else None

    @property
    def is_running(self) -> bool:
        """True while lanes work on it for somebody who may wait."""
        running = self._running
        return running is not None and not running.is_set()

    def wait(self, deadline: Deadline) -> bytearray:
        """Waits; returns one byte per index, 1 if it was read.

        Past the deadline the memory is withdrawn: what was read until then counts.
        """
        batch, self._batch = self._batch, None  # it refers to our work, and so to us and the caller's memory
        try:
            if batch is not None:
                if self._helps:
                    batch.help(deadline)
                batch.wait(deadline)
        except DeadlinePassed:
            self._borrowed.withdraw()
            self._counters.add(NodeCount.MISS_DEADLINE)
        except KVStoreError:
            self._counters.add(NodeCount.MISS_SHED)
        except BaseException:
            # Interrupted (Ctrl-C): from here on the memory is the caller's, as after a deadline.
            self._borrowed.withdraw()
            raise
        finally:
            self._end()
        return self._done

    def withdraw(self) -> None:
        """Gives the read up: returns when nobody writes into the memory any more. Idempotent."""
        self._borrowed.withdraw()
        if self._batch is not None:
            self._batch.stop()
        self._end()

    def _end(self) -> None:
        """Ends the read: nobody writes into the memory any more."""
        self._running = None
        turns, self._turns = self._turns, None
        if turns is not None:
            np.frombuffer(self._done, np.bool_)[:] |= turns.end()
        if self._ended is not None:
            self._ended()

    def _work_on_turns(self, turns: SharedRead, _: int) -> bool:
        """Reads what no other lane took, as ``_work_on_group`` does."""
        more = True
        while more:
            try:
                left, more = turns.read(self._borrowed)
            except Withdrawn:
                return False
            if not all(map(self._work, left)):
                turns.stop()
                return False
            moved_on()
        return True

    def _work_on_group(self, number: int) -> bool:
        """Reads the group at once as far as that goes, then the rest one by one from scratch."""
        groups = self._groups
        assert groups is not None
        start, stop = number * groups.size, min((number + 1) * groups.size, groups.chunks)
        try:
            read = groups.read(start, stop, self._borrowed)
        except Withdrawn:
            return False
        self._done[start:stop] = read.tobytes()
        left = (start + np.flatnonzero(~read)).tolist()
        return all(self._work(index) for index in left)

    def _work(self, index: int) -> bool:
        try:
            intact = self._read(index, self._borrowed)
        except Withdrawn:
            return False
        except KVStoreError:
            self._counters.add(NodeCount.MISS_UNREADABLE)
            return not self._stop_at_miss
        self._done[index] = intact
        return intact or not self._stop_at_miss


def read_chunks(
    lanes: Lanes,
    counters: Counters,
    count: int,
    read: Callable[[int, Borrowed], bool],
    deadline: Deadline,
    stop_at_miss: bool = True,
    groups: Groups | None = None,
) -> bytearray:
    """Calls ``read(index, borrowed)`` for 0 to count - 1 on the lanes; returns one byte per index, 1 if it succeeded.

    Begins no more after a miss, unless ``stop_at_miss`` is False.
    """
    return Reading(lanes, counters, count, read, stop_at_miss, groups).wait(deadline)


def verified(
    wanted: Wanted,
    indexes: Sequence[int],
    images: Sequence[memoryview],
    lanes: Lanes,
    deadline: Deadline,
    *,
    helps: bool = True,
) -> bytes:
    """Returns a byte for each image, 1 if it is that of the chunk at its index, whole and right.

    Several lanes verify, and the calling thread if it ``helps``. Past the deadline, what is verified by then is right.
    """
    size = group_size(len(images), len(images[0]) if images else 0, lanes.width)
    right = np.zeros(len(images), np.bool_)

    def verify(number: int) -> bool:
        part = slice(number * size, (number + 1) * size)
        right[part] = verify_images(wanted, indexes[part], images[part])
        return True

    with suppress(KVStoreError):
        (lanes.share if helps else lanes.each)(-(-len(images) // size), verify, deadline)
    return right.tobytes()


def root_groups(chunks: Chunks, lanes: Lanes, wanted: Wanted, first: int, count: int, into: Sections) -> Groups | None:
    """Returns chunks from ``first`` on on the root in groups, counted from 0; None if they are read one by one."""
    run = chunks.runs.of(wanted, first, count, into, fills=True)
    if run is None:
        return None

    def read(start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
        return chunks.runs.read(run, first + start, first + stop, borrowed)

    chunk_bytes = max(1, mean_bytes(wanted, first, count))
    size = group_size(count, chunk_bytes, lanes.width)
    step = max(1, min(size, GROUP_BYTES_MIN // chunk_bytes))
    most = max(step, min(GROUP_BYTES_MAX // chunk_bytes, TURN_CHUNKS_MAX))
    return Groups(size, count, read, chunks.runs.shared_read(run, Sizes(step, most, size)))
