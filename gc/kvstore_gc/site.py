"""The site of a collector: a root, its metadata store, and the clock, ids, timings and threads to use.

One value, handed on whole, instead of eight parameters in every constructor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.meta.keys import Keys
from kvstore.meta.store import Meta
from kvstore.root.identity import RootIdentity
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids, RandomIds, SystemClock
from kvstore_gc.safety import Timings
from kvstore_gc.threads import Each, inline


@dataclass(frozen=True, slots=True)
class Site:
    """``each`` spreads calls to the root over threads. ``pause`` waits, and raises Stopped when the end is near."""

    root: Root
    identity: RootIdentity
    meta: Meta
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = field(default_factory=RandomIds)
    timings: Timings = field(default_factory=Timings)
    each: Each = inline
    pause: Callable[[float], object] = time.sleep

    @property
    def keys(self) -> Keys:
        """The names of this root's keys in the metadata store."""
        return Keys(self.identity.root)

    @property
    def shards_count(self) -> int:
        """The number of shards of the root."""
        return 1 << self.identity.shard_bits

    @property
    def timeout_s(self) -> float:
        """The time-out of one call to the metadata store."""
        return self.timings.meta_timeout_s
