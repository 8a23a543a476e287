"""The log of segments: which texts begin one, so that all processes of a store find them at any offset (SEGMENTS.md,
S10).

A log is a row of blocks for each hour, in the namespace of the segments, under consecutive numbers: the first writer of
a number wins. With one row for all time, its end could not be found once its beginning was evicted. A block repeats the
newest records that its writer knew. So a reader that is behind reads only some of them, and later ones make up for one
that is lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.core.address import TokenArray
from kvstore.core.clock import Clock, SystemClock
from kvstore.errors import KVStoreError
from kvstore.segments.search import Index, windows

if TYPE_CHECKING:
    from kvstore.client.cache import BlockCache

RECORD = np.dtype([("window", "<u8"), ("chunks", "<u4")])
"""The hash of a segment's first chunk, and the number of its chunks; zeros fill a block."""
RECORDS = 256
"""Records of a block."""
NEW_MAX = 4
"""Those of them that the block before it has not."""
STRIDE = RECORDS // NEW_MAX
HOURS = 168
"""A process begins with the logs of so many hours, a week."""
HOUR_S = 3600.0
LATE_S = 60.0
"""The log of an hour may grow for so long after its end: clocks differ."""
LOOK_S = 1.0
"""Shortest time between two looks at the log."""
PROBES, PROBES_MAX = 4, 20
"""Numbers read in one batch to find the newest block: 0, 1, 3, 7, ... after the last known one."""
READS_MAX = 256
"""Limit on the blocks of one hour that a process reads in one batch: those of the last 65,536 records."""
TRIES_MAX = 8
"""A record is left out if other processes win so many numbers before it."""

Records = npt.NDArray[Any]


class Log:
    """The index of one namespace of segments, and this process's place in its log. Thread-safe.

    It is a hint: what cannot be read or written is left out, and nothing raises for it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.index = Index()
        self._clock = clock or SystemClock()
        self._new: deque[tuple[int, int]] = deque()
        self._turn = threading.Semaphore()  # guards what follows, and is held during calls to the store
        self._ends: dict[int, int] = {}
        """By hour, the number behind the newest block."""
        self._newest: dict[int, Records] = {}
        """By hour, the records of that block."""
        self._first_hour = 0
        """The logs of the hours before it have ended, and were read."""
        self._looked_s = float("-inf")

    def add(self, blocks: BlockCache, tokens: TokenArray, chunks: int) -> None:
        """Records a stored segment by its first chunk's tokens: here immediately, for other processes in the log."""
        window = windows(tokens, len(tokens))
        if self.index.lengths(window)[0] >= chunks:
            return
        self.index.add(window, np.array([chunks]))
        self._new.append((int(window[0]), chunks))
        with self._turn, suppress(KVStoreError):
            # Also what other threads add; they find nothing left then.
            while new := [self._new.popleft() for _ in range(min(NEW_MAX, len(self._new)))]:
                self._append(blocks, np.array(new, RECORD))

    def follow(self, blocks: BlockCache) -> None:
        """Takes into the index what others have put, at most once in ``LOOK_S``."""
        if not self._turn.acquire(blocking=False):
            return  # another thread does
        try:
            looked_s, now_s = self._clock.monotonic_s(), self._clock.now_s()
            if looked_s - self._looked_s < LOOK_S:
                return
            self._looked_s, last = looked_s, int(now_s // HOUR_S)
            hours = range(max(last - HOURS, self._first_hour), last + 1)
            with suppress(KVStoreError):
                places = [(hour, number) for hour in hours if hour not in self._ends for number in _numbers(0, PROBES)]
                for hour in sorted({hour for hour, _ in self._blocks(blocks, places)} | self._ends.keys() & {*hours}):
                    self._read(blocks, hour)
                self._first_hour = int((now_s - LATE_S) // HOUR_S)
        finally:
            self._turn.release()

    def _append(self, blocks: BlockCache, new: Records) -> None:
        hour = int(self._clock.now_s() // HOUR_S)
        for _ in range(TRIES_MAX):
            place = hour, self._ends.get(hour, 0)
            records = np.concatenate([self._newest.get(hour, new[:0]), new])[-RECORDS:]
            image = records.tobytes().ljust(RECORDS * RECORD.itemsize, b"\0")
            won = self._blocks(blocks, [place]).get(place) if blocks.put([_key(*place)], [image])[0] else None
            if won is None:
                return
            if won.tobytes() == records.tobytes():
                self._ends[hour], self._newest[hour] = place[1] + 1, records
                return
            self._read(blocks, hour)

    def _read(self, blocks: BlockCache, hour: int) -> None:
        """Reads what an hour's log has behind the last block that is known."""
        start = end = self._ends.get(hour, 0)
        probes = PROBES
        while found := self._blocks(blocks, [(hour, number) for number in _numbers(end, probes)]):
            newest = max(found)
            end, self._newest[hour] = newest[1] + 1, found[newest]
            probes = min(2 * probes, PROBES_MAX) if len(found) == probes else probes
        self._ends[hour] = end
        # The newest was read. Each of the others has what is new in the STRIDE blocks that end with it.
        others = range(end - 1 - STRIDE, start - 1, -STRIDE)[:READS_MAX]
        self._blocks(blocks, [(hour, number) for number in others])

    def _blocks(self, blocks: BlockCache, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Records]:
        """Reads blocks, each by hour and number, into the index; returns the records of those that are there."""
        found = dict[tuple[int, int], Records]()
        images = [np.zeros(RECORDS, RECORD) for _ in places]
        hits = blocks.get([_key(*place) for place in places], images) if places else []
        for place, records, hit in zip(places, images, hits, strict=True):
            if hit:
                found[place] = records = records[records["chunks"] > 0]
                self.index.add(records["window"], records["chunks"])
        return found


def _numbers(first: int, count: int) -> list[int]:
    """Numbers to look for the end of a log at: ever farther apart."""
    return [first + (1 << power) - 1 for power in range(count)]


def _key(hour: int, number: int) -> bytes:
    return blake2b(b"%d %d" % (hour, number), digest_size=16, person=b"kvstore.segments").digest()
