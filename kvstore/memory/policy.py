"""Policies: which evictable entry goes first, and what is asked for often enough to be brought in.

A policy sorts entries into a few *queues*, by their ``Worth``; within each the one unused for longest is first. When
room is needed it compares the heads of the queues, so that ranks may change with time and yet nothing is sorted again.
Pure, and separate from the queues, because it is the part that a trace replay judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvstore.address import Address
from kvstore.hints import PRIORITY_DEFAULT
from kvstore.memory.entry import Entry, Queue, Worth

OCTAVES_PER_USE = 0.5
OCTAVES_PER_PRIORITY = 0.1
"""Octaves of age that one unit of priority is worth, as in the collector (gc/kvstore_gc/policy.py)."""
REPLICA_OCTAVES = 1.0
"""A replica counts as twice as old (P4). It does not go before all others: a full node would then keep no replica until
its second use, however hot.
"""
PRIORITY_STEP = 5
"""Priorities are rounded to this, which bounds the number of queues."""
AGE_LEAST_S = 30.0
"""Added to every age, so that brand-new entries do not outlast everything."""
PROBATION_SHARE = 0.1
"""Share of the held bytes that entries never used again may take, in ``TwoQueue``."""
GHOSTS_MAX = 65_536
ASKED_MAX = 65_536
ASKED_LASTS_S = 3_600.0


class Policy(Protocol):
    """An order of eviction. Each inventory has its own object, which may keep state. There are few different worths."""

    def worth(self, entry: Entry) -> Worth:
        """Returns which queue an entry belongs to; asked when it becomes ready, and when its uses or hints change."""

    def first(self, candidates: Sequence[Queue], queues: Sequence[Queue], now_s: float) -> Queue:
        """Returns the queue whose head goes first: one of ``candidates``, the queues with an evictable entry."""

    def evicted(self, entry: Entry) -> None:
        """Notes that an entry was evicted."""


class Aged:
    """Evicts the oldest, by an age weighted with uses and hints, as on the root.

    An entry used more often outlasts one used once, in proportion to how long entries last here at all. Entries past
    their ttl go before all others.
    """

    def __init__(self, octaves_per_use: float = OCTAVES_PER_USE) -> None:
        self._octaves_per_use = octaves_per_use

    def worth(self, entry: Entry) -> Worth:
        steps = round((entry.priority - PRIORITY_DEFAULT) / PRIORITY_STEP)
        octaves = steps * PRIORITY_STEP * OCTAVES_PER_PRIORITY + entry.uses * self._octaves_per_use
        return Worth(octaves - entry.is_replica * REPLICA_OCTAVES, entry.hints.ttl_s)

    def first(self, candidates: Sequence[Queue], queues: Sequence[Queue], now_s: float) -> Queue:
        return max(candidates, key=lambda queue: self._staleness(queue, now_s))

    def evicted(self, entry: Entry) -> None:
        pass

    def _staleness(self, queue: Queue, now_s: float) -> tuple[bool, float]:
        octaves, ttl_s, _ = queue.worth
        age_s = max(now_s - queue.oldest_s, 0.0)
        return ttl_s is not None and age_s >= ttl_s, (age_s + AGE_LEAST_S) * 2.0**-octaves


class TwoQueue:
    """Puts new entries on probation until they are used again.

    They go first while those on probation hold more than their share, so a scan passes through without evicting the
    rest. Otherwise, and within each part, the order is that of ``Aged``. An entry that was evicted on probation and
    comes back soon is not put on probation again. After S3-FIFO (Yang et al., SOSP 2023).
    """

    def __init__(self, share: float = PROBATION_SHARE) -> None:
        self._share = share
        self._aged = Aged(octaves_per_use=0.0)
        self._ghosts = Admission(GHOSTS_MAX, math.inf)

    def worth(self, entry: Entry) -> Worth:
        is_new = not entry.uses and not self._ghosts.knows(entry.address)
        return self._aged.worth(entry)._replace(is_on_probation=is_new)

    def first(self, candidates: Sequence[Queue], queues: Sequence[Queue], now_s: float) -> Queue:
        held_bytes = sum(queue.held_bytes for queue in queues)
        new_bytes = sum(queue.held_bytes for queue in queues if queue.worth.is_on_probation)
        is_over = new_bytes > self._share * held_bytes
        some = [queue for queue in candidates if queue.worth.is_on_probation == is_over]
        return self._aged.first(some or candidates, queues, now_s)

    def evicted(self, entry: Entry) -> None:
        if not entry.uses:
            self._ghosts.asked(entry.address, entry.used_s)


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {"lru": lambda: Aged(octaves_per_use=0.0), "uses": Aged, "two_queue": TwoQueue}
)
DEFAULT_POLICY = "lru"
"""The policy with the most hits in memory and on the disk (MEMORY.md, Which policy)."""


class Admission:
    """The addresses asked for lately: at most ``addresses_max``, for about ``lasts_s``. Not thread-safe.

    It keeps two generations and forgets the older one at once, so it remembers half to all of the limit.
    """

    def __init__(self, addresses_max: int = ASKED_MAX, lasts_s: float = ASKED_LASTS_S) -> None:
        self._generation_max = max(addresses_max // 2, 1)
        self._lasts_s = lasts_s / 2
        self._new: set[Address] = set()
        self._old: set[Address] = set()
        self._began_s = -math.inf

    def asked(self, address: Address, now_s: float) -> bool:
        """Notes that an address is asked for; True if it was asked for before, not long ago."""
        age_s = now_s - self._began_s
        if len(self._new) >= self._generation_max or age_s >= self._lasts_s:
            # After a long silence the newer generation is too old as well.
            self._old = self._new if age_s < 2 * self._lasts_s else set()
            self._new, self._began_s = set(), now_s
        known = self.knows(address)
        self._new.add(address)
        return known

    def knows(self, address: Address) -> bool:
        """True if it was asked for, not long ago."""
        return address in self._new or address in self._old
