"""The log of segments: which texts begin one, so that all processes of a store find them at any offset (SEGMENTS.md,
S10).

A log is a row of blocks for each day, in the namespace of the segments, under consecutive numbers: the first writer of
a number wins. A block repeats the newest records that its writer knew. So a reader that is behind reads only some of
them, and a block that is lost is made up for by those after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.segments.index import Index, windows
from kvstore.sources import Clock, SystemClock
from kvstore.tokens import TokenArray

if TYPE_CHECKING:
    from kvstore.client.blocks import BlockCache

RECORD = np.dtype([("window", "<u8"), ("chunks", "<u4")])
"""The hash of a segment's first chunk, and the number of its chunks; zeros fill a block."""
RECORDS = 256
"""Records of a block."""
NEW_MAX = 4
"""Those of them that the block before it has not."""
STRIDE = RECORDS // NEW_MAX
DAYS = 7
"""A process begins with the logs of so many days."""
DAY_S = 86_400.0
LATE_S = 60.0
"""The log of a day may grow for so long after its end: clocks differ."""
LOOK_S = 1.0
"""Shortest time between two looks at the log."""
PROBES, PROBES_MAX = 4, 20
"""Numbers that are read at once to find the newest block: 0, 1, 3, 7, ... behind the last one that is known."""
READS_MAX = 4096
"""Limit on the blocks of one day that a process reads at once: those of the last 1,048,576 records."""
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
        self._turn = threading.Semaphore()  # guards what follows; the store is called meanwhile
        self._ends: dict[int, int] = {}
        """By day, the number behind the newest block."""
        self._newest: dict[int, Records] = {}
        """By day, the records of that block."""
        self._first_day = 0
        """The logs of the days before it have ended, and were read."""
        self._looked_s = float("-inf")

    def add(self, blocks: BlockCache, tokens: TokenArray, chunks: int) -> None:
        """Notes a segment that was put, by the tokens of its first chunk: here at once, and for others in the log."""
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
            self._looked_s, today = looked_s, int(now_s // DAY_S)
            with suppress(KVStoreError):
                for day in range(max(today - DAYS, self._first_day), today + 1):
                    self._read(blocks, day)
                self._first_day = int((now_s - LATE_S) // DAY_S)
        finally:
            self._turn.release()

    def _append(self, blocks: BlockCache, new: Records) -> None:
        day = int(self._clock.now_s() // DAY_S)
        for _ in range(TRIES_MAX):
            number = self._ends.get(day, 0)
            records = np.concatenate([self._newest.get(day, new[:0]), new])[-RECORDS:]
            image = records.tobytes().ljust(RECORDS * RECORD.itemsize, b"\0")
            stored = blocks.put([_key(day, number)], [image])
            won = self._blocks(blocks, day, [number]).get(number) if stored[0] else None
            if won is None:
                return
            if won.tobytes() == records.tobytes():
                self._ends[day], self._newest[day] = number + 1, records
                return
            self._read(blocks, day)

    def _read(self, blocks: BlockCache, day: int) -> None:
        """Reads what a day's log has behind the last block that is known."""
        start = end = self._ends.get(day, 0)
        probes = PROBES
        while found := self._blocks(blocks, day, [end + (1 << power) - 1 for power in range(probes)]):
            end, self._newest[day] = max(found) + 1, found[max(found)]
            probes = min(2 * probes, PROBES_MAX) if len(found) == probes else probes
        self._ends[day] = end
        # The newest was read. Each of the others has what is new in the STRIDE blocks that end with it.
        self._blocks(blocks, day, range(end - 1 - STRIDE, start - 1, -STRIDE)[:READS_MAX])

    def _blocks(self, blocks: BlockCache, day: int, numbers: Iterable[int]) -> dict[int, Records]:
        """Reads these of a day's blocks into the index; returns the records of those that are there."""
        found, keys = {}, {number: _key(day, number) for number in numbers}
        images = [np.zeros(RECORDS, RECORD) for _ in keys]
        for number, records, hit in zip(
            keys, images, blocks.get([*keys.values()], images) if keys else (), strict=True
        ):
            if hit:
                found[number] = records = records[records["chunks"] > 0]
                self.index.add(records["window"], records["chunks"])
        return found


def _key(day: int, number: int) -> bytes:
    return blake2b(b"%d %d" % (day, number), digest_size=16, person=b"kvstore.segments").digest()
