"""The site of a collector: a root, its metadata store, and the clock, ids, timings and threads to use.

One value, handed on whole, instead of eight parameters in every constructor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.core.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.meta.keys import Keys
from kvstore.meta.store import MetadataStore
from kvstore.root.identity import RootIdentity
from kvstore.root.interface import Root
from kvstore_gc.threads import Each, inline

# Every timing of garbage collection in one place.
#
# Safety rests on revisions and on the fence, and needs none of them: they limit waiting and leftovers. That holds for
# the ages of leftovers too: a put whose staged file is gone fails before any of it is visible, and a sweep
# whose plan is gone takes nothing. The ages only have to be long enough that this does not happen to work in
# progress.


@dataclass(frozen=True, slots=True)
class Timings:
    """The timings of a collector."""

    hung_s: float = 60.0
    """A root that has not reported its free space for this long hangs: a single round ends, a service logs it."""
    meta_timeout_s: float = 5.0
    """A call to etcd."""
    refs_timeout_s: float = 120.0
    """The read of all keys with all pins, which may be a gigabyte."""
    poll_s_min: float = 0.05
    """The first pause between two looks at the announcements of nodes."""
    poll_s_max: float = 1.0
    """The longest such pause; each is twice the one before."""
    announce_lag_max_s: float = 375.0
    """A session that has not announced a sweep for this long is revoked (rule H4). Its node has given up before: 330 s
    and one ttl after it learned of the sweep, which takes at most two looks for a gap."""
    grace_max_s: float = 450.0
    """A sweep whose grace is not over by then is abandoned: closed without taking anything. It outlasts the node that
    delays it."""
    staging_age_s: float = 180.0
    """Staged files without a live session are deleted at this age: it is longer than a put takes (30 s by default) from
    the time that its file carries (the start of its quantum, 30 s) and than the clocks of hosts differ by."""
    plan_age_s: float = 150.0
    """Plans that no sweep names are deleted at this age: it is longer than a collector takes from its first plan to the
    transaction that names it, and than clocks differ by."""
    quarantine_age_s: float = 86_400.0
    """Damaged files whose chunk was last used longer ago are deleted."""
    twin_margin_s: float = 3600.0
    """A pin's twin is deleted this long after the pin's end: more than the clocks of hosts disagree by."""


@dataclass(frozen=True, slots=True)
class Site:
    """``each`` spreads calls to the root over threads. ``pause`` waits, and raises Stopped when the end is near."""

    root: Root
    identity: RootIdentity
    meta: MetadataStore
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
