"""Look-ups in the background, so that the scheduler never waits for the store.

Each has a deadline that starts when it is requested. Past it, it is a miss, and for a while all others are misses too,
so that a store that hangs costs one deadline and not one per request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstore.connectors.common import LazyStore, match, present
from kvstore.connectors.vllm.blocks import Tail, last_boundary
from kvstore.connectors.vllm.metrics import EngineCount, EngineCounts
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.core.executor import Decision, Loop
from kvstore.errors import KVStoreError

POLL_S = 0.02
"""Interval between two looks for blocks that another engine is writing."""
THREADS = 2


@dataclass(slots=True)
class LookupResult:
    """Leading units of a prompt in the store: counted from its start, and from the unit asked for."""

    from_start: int
    from_asked: int
    """Those that can be loaded."""
    is_known: bool = True
    """False if the store did not answer."""
    shared: int = 0
    """Those whose attention to all tokens is there, if that is more than can be loaded."""


UNKNOWN = LookupResult(0, 0, is_known=False)


@dataclass(slots=True)
class Lookup:
    """One prompt being looked up. ``asked`` are the units known locally."""

    keys: Sequence[Sequence[bytes]]
    """The keys of each unit of the prompt. A hit needs all keys of its units."""
    asked: int
    started_s: float
    wait_until_s: float
    found: LookupResult | None = None
    """Set once: by the thread that looked, or past the deadline."""
    tails: Sequence[Tail] = ()
    """The other keys."""
    unit: int = 1
    """Tokens of a unit, for ``tails``."""
    due_s: float = 0.0
    """When to look next."""
    abandoned: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    """Set once a thread has looked."""

    def first_key(self, unit: int) -> bytes:
        """Returns the first key of a unit; empty if a hit needs no whole unit of this model."""
        return next(iter(self.keys[unit]), b"")


class Lookups:
    """The threads that look up. Thread-safe; ``begin`` and ``result`` never block."""

    def __init__(
        self,
        settings: ConnectorSettings,
        store: LazyStore,
        counts: EngineCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._store = store
        self._counts = counts
        self._clock = clock
        self._paused_until_s = 0.0
        self._waiting: list[Lookup] = []
        self._condition = threading.Condition()
        self._loop = Loop("kvstore-vllm-lookup", self._condition, self._next, threads_max=THREADS)
        for _ in range(THREADS):
            self._loop.start()

    def renew(self, keys: Sequence[Sequence[bytes]]) -> None:
        """Has the store record a use of these units, in the background."""
        self._begin(Lookup(keys, 0, self._clock(), 0.0))

    def begin(self, keys: Sequence[Sequence[bytes]], asked: int, tails: Sequence[Tail] = (), unit: int = 1) -> Lookup:
        """Starts to look up the units from ``asked`` on."""
        now = self._clock()
        return self._begin(Lookup(keys, asked, now, now + self._settings.wait_s, tails=tails, unit=unit))

    def _begin(self, lookup: Lookup) -> Lookup:
        keys, now = lookup.keys, lookup.started_s
        if not keys or now < self._paused_until_s or self._store.caches() is None:
            lookup.found = UNKNOWN
            return lookup
        with self._condition:
            self._waiting.append(lookup)
            self._condition.notify()
        return lookup

    def result(self, lookup: Lookup) -> LookupResult | None:
        """Returns the units found; None while the look-up runs within its deadline."""
        if lookup.found is not None:
            return lookup.found
        if self._clock() < lookup.started_s + self._settings.wait_s + self._settings.lookup_timeout_s:
            return None
        lookup.abandoned = True
        lookup.found = UNKNOWN
        self._counts.add(EngineCount.LOOKUP_TIMEOUTS)
        self.pause()
        return lookup.found

    def pause(self) -> None:
        """Makes look-ups misses for a while: the store did not answer in time."""
        self._paused_until_s = self._clock() + self._settings.pause_s

    def close(self) -> None:
        """Ends the threads; one that is stuck ends with the process."""
        self._loop.stop()

    def _next(self) -> Decision:
        now = self._clock()
        for at, lookup in enumerate(self._waiting):
            if lookup.due_s <= now:
                del self._waiting[at]
                return partial(self._serve, lookup)
        return min(each.due_s for each in self._waiting) - now if self._waiting else None

    def _serve(self, lookup: Lookup) -> None:
        if lookup.abandoned:
            return
        began_s = self._clock()
        try:
            found = self._look(lookup)
        except KVStoreError:
            found = UNKNOWN
        if lookup.abandoned:
            return
        if self._clock() - began_s >= self._settings.lookup_timeout_s:
            self.pause()
        if found.from_asked < len(lookup.keys) and self._clock() < lookup.wait_until_s:
            lookup.due_s = self._clock() + POLL_S
            with self._condition:
                self._waiting.append(lookup)
        else:
            lookup.found = found
            lookup.done.set()

    def _look(self, lookup: Lookup) -> LookupResult:
        caches = self._store.caches()
        if caches is None:
            return UNKNOWN

        def leading(first: int) -> int:
            """Returns the units present on every rank, counted from the prompt's start."""
            count = len(lookup.keys)
            for cache in caches:
                if count <= first:
                    break
                keys = [key for unit in lookup.keys[first:count] for key in unit]
                found = match(cache, keys)
                sizes = 0
                for index in range(first, count):
                    sizes += len(lookup.keys[index])
                    if sizes > found:
                        count = index
                        break
            return max(count, first)

        def on_every_rank(keys: Sequence[bytes]) -> list[bool]:
            ranks = [present(cache, keys) for cache in caches]
            return [all(each) for each in zip(*ranks, strict=True)]

        from_start = leading(0)
        shared = from_start if from_start >= lookup.asked else leading(lookup.asked)
        if not lookup.tails or shared <= lookup.asked:
            return LookupResult(from_start, shared)
        found = last_boundary(lookup.tails, lookup.unit, lookup.asked, shared, on_every_rank)
        return LookupResult(from_start, found, shared=shared if shared > found else 0)
