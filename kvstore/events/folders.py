"""Which shards have to be listed, and when: decided from the times of their folders. Pure: no I/O, no clock.

A listing tells nothing that came within the same tick of the file system's clock as its start. So a folder is listed
at once when its time changes, and once more when that time has stood for ``settle_s`` by our own clock.
"""

from __future__ import annotations

import numpy as np

from kvstore.events.limits import EventLimits

NEVER_S = float("-inf")
BURST_S = 0.5
"""Time for listings that may be saved up while nothing changes."""


class Folders:
    """The shards of one root. Times are monotonic seconds of the publisher, folder times are numbers to compare."""

    def __init__(self, count: int, limits: EventLimits) -> None:
        self._limits = limits
        self._times = np.full(count, -1, np.int64)
        self._since_s = np.full(count, NEVER_S)
        self._listed_times = np.full(count, -2, np.int64)
        self._listed_s = np.full(count, NEVER_S)
        self._must = np.ones(count, np.bool_)
        self._next = 0
        self._credit_s = BURST_S
        self._counted_s = NEVER_S
        self.has_times = True
        """False if the root's folders have no times."""

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self._times)

    @property
    def is_complete(self) -> bool:
        """True once every shard was listed."""
        return bool((self._listed_s > NEVER_S).all())

    def to_look_at(self) -> list[int]:
        """Returns the shards whose folders are to be looked at now, in turns if there are many."""
        if not self.has_times:
            return []
        count = min(self.count, self._limits.folders_max)
        chosen = [(self._next + at) % self.count for at in range(count)]
        self._next = (self._next + count) % self.count
        return chosen

    def looked(self, shard: int, time: int | None, now_s: float) -> None:
        """Notes the time of a folder; None if it has none."""
        if time is None:
            self.has_times = False
        elif time != self._times[shard]:
            self._times[shard], self._since_s[shard] = time, now_s

    def must_list(self, shard: int | None) -> None:
        """Has a shard listed as soon as possible; None: all of them."""
        self._must[slice(None) if shard is None else shard] = True

    def due(self, now_s: float) -> int | None:
        """Returns the shard to list now, the one that waits longest; None if there is none."""
        urgent = np.flatnonzero(self._must)
        if len(urgent):
            return int(urgent[self._listed_s[urgent].argmin()])
        if self._credit(now_s) <= 0:
            return None
        is_due = now_s - self._listed_s >= self._limits.relist_s
        if self.has_times:
            settled_s = self._since_s + self._limits.settle_s
            is_due &= (self._times != self._listed_times) | ((self._listed_s < settled_s) & (now_s >= settled_s))
        found = np.flatnonzero(is_due)
        return int(found[self._listed_s[found].argmin()]) if len(found) else None

    def listed(self, shard: int, time: int | None, began_s: float, ended_s: float) -> None:
        """Notes a whole listing; ``time`` is the folder's before it began."""
        self._listed_s[shard], self._must[shard] = began_s, False
        if time is not None:
            self.looked(shard, time, began_s)
            self._listed_times[shard] = time
        self._credit_s = self._credit(ended_s) - (ended_s - began_s)

    def _credit(self, now_s: float) -> float:
        """Returns the time that listings may take now: a share of all time, saved up for a while."""
        earned_s = (now_s - self._counted_s) * self._limits.list_share
        self._credit_s, self._counted_s = min(BURST_S, self._credit_s + earned_s), now_s
        return self._credit_s
