"""Locks that LMCache took by a look-up and has not yet released: holds of the store, by LMCache's keys.

A lock ends when its last key is unlocked, or after a time, because the process that should unlock may have died.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvstore.client.cache import BlockHold
from kvstore.sources import Clock


@dataclass(slots=True, eq=False)
class Lock:
    """One hold, and the number of its keys that are still locked."""

    hold: BlockHold
    keys: Sequence[Hashable]
    left: int
    ends_s: float


class Locks:
    """All locks of one adapter. Thread-safe."""

    def __init__(self, lock_s: float, clock: Clock) -> None:
        self._lock_s = lock_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._by_key: dict[Hashable, deque[Lock]] = {}
        self._by_age: deque[Lock] = deque()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, hold: BlockHold, keys: Sequence[Hashable]) -> None:
        """Locks ``keys``, which ``hold`` covers; releases the hold if there are none."""
        ended = self._expired()
        if keys:
            lock = Lock(hold, keys, len(keys), self._clock.monotonic_s() + self._lock_s)
            with self._mutex:
                self._by_age.append(lock)
                for key in keys:
                    self._by_key.setdefault(key, deque()).append(lock)
        else:
            ended.append(hold)
        for each in ended:
            each.release()

    def remove(self, keys: Sequence[Hashable]) -> None:
        """Unlocks each key once; skips those that are not locked. Never raises."""
        ended: list[BlockHold] = []
        with self._mutex:
            for key in keys:
                locks = self._by_key.get(key)
                if not locks:
                    continue
                lock = locks.popleft()
                if not locks:
                    del self._by_key[key]
                lock.left -= 1
                if not lock.left:
                    ended.append(lock.hold)
            while self._by_age and not self._by_age[0].left:
                self._by_age.popleft()
        for each in ended:
            each.release()

    def of(self, key: Hashable) -> BlockHold | None:
        """Returns the oldest hold on a key, or None."""
        with self._mutex:
            locks = self._by_key.get(key)
            return locks[0].hold if locks else None

    def clear(self) -> None:
        """Unlocks everything."""
        with self._mutex:
            holds = [lock.hold for lock in self._by_age if lock.left]
            self._by_age.clear()
            self._by_key.clear()
        for hold in holds:
            hold.release()

    def _expired(self) -> list[BlockHold]:
        """Removes and returns the holds of expired and ended locks."""
        now_s = self._clock.monotonic_s()
        ended: list[BlockHold] = []
        with self._mutex:
            while self._by_age and (not self._by_age[0].left or self._by_age[0].ends_s <= now_s):
                lock = self._by_age.popleft()
                if not lock.left:
                    continue
                for key in lock.keys:
                    locks = self._by_key.get(key)
                    if locks and lock in locks:
                        locks.remove(lock)
                        if not locks:
                            del self._by_key[key]
                lock.left = 0
                ended.append(lock.hold)
        return ended
