"""One cycle: check, recover open sweeps, list and rank, evict, remove leftovers (gc/PROTOCOL.md).

It may stop after any step without harm: the next collector recovers whatever is open then.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.core.validate import size
from kvstore.errors import RootMismatch
from kvstore.meta.cluster import difference, read_generation
from kvstore.meta.keys import PARTS
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.sweeps import VICTIMS_MAX
from kvstore.root.identity import read_newest
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.deletion import SweepPlan
from kvstore_gc.execute import USED, Sweeper
from kvstore_gc.leftovers import Orphans, other_files
from kvstore_gc.membership import Collectors
from kvstore_gc.policy import Goals
from kvstore_gc.rank import Parents, Ranking, Rows, parts_of, victims_of
from kvstore_gc.site import Site
from kvstore_gc.summary import Summary

log = logging.getLogger(__name__)

CONDEMNED_MAX = 12_000
"""Victims chosen in one slice and condemned together: one sweep takes a part's share of them."""
SLICE_SHARE = 1 / 4
"""The share of the headroom, or of a larger excess, in one slice of eviction. Within it children and parents are
condemned in any order."""
SLICE_SHARE_MIN = 1 / 8
"""The least share of the headroom in a slice: with fewer chunks sweeps cost more."""
FRESH_S = 0.5
"""Chunks used so shortly before a listing, or during it, stay until the next one: a child that the listing lacks, put
in the same tick, would lose its parent."""
LISTING_S_MIN = FRESH_S


class Cycle:
    """The cycles of one collector. One thread at a time."""

    def __init__(
        self,
        site: Site,
        config: Config,
        pressure: Pressure,
        collectors: Collectors | None = None,
        listed: Callable[[int], object] = lambda shard: None,
    ) -> None:
        """One of ``collectors`` works; the others stand by. ``listed`` is called after each listed shard."""
        self._site = site
        self._root = site.root
        self._clock = site.clock
        self._timeout_s = site.timeout_s
        self._config = config
        self._pressure = pressure
        self._collectors = collectors
        self._listed = listed
        self._orphans = Orphans(site, pressure)
        self._parents = Parents(site)
        self._sweeper = Sweeper(site, pressure)
        self._warned = False
        self._leads = False
        # The listing that eviction works on.
        self._ranking: Ranking | None = None
        self._listing_s = LISTING_S_MIN
        self._picks = deque[tuple[int, Rows]]()
        """Chunks of the present slice that were not condemned yet, by part: at most as many as one sweep takes."""

    @property
    def waiting_s(self) -> float:
        """Seconds that sweeps in flight have waited for nodes to announce them; 0 if none waits. From any thread."""
        return self._sweeper.waiting_s

    @property
    def is_spent(self) -> bool:
        """True if eviction needs another listing."""
        if self._leads != self._pressure.leads:
            return True
        is_spent = self._ranking is None or (self._ranking.is_spent and self._needed_bytes() > 0)
        return self._leads and (is_spent or not self._pressure.accounts.is_listed)  # not any more if another led

    @property
    def listing_s(self) -> float:
        """The time that the last listing took, or more."""
        return self._listing_s

    def run(self) -> Summary:
        """Does a whole cycle; only checks (C6) while another collector works.

        Raises the errors of the root and of the metadata store, Stopped, and RootMismatch if the metadata store and the
        root do not belong together.
        """
        summary = self._summary(dry_run=False)
        with self._sweeper.abandoning(summary):
            with self._timed(summary, "check"):
                self._sweeper.check()  # C6
            self._leads = self._pressure.leads
            if not self._leads:
                return summary
            self._sweeper.recover(summary)  # G7
            # Before anything that may take long: no credit is published before the first listing.
            ranking = self._rank(summary)
            self._evict(summary)  # G1 to G6
            self._remove_leftovers(summary)  # F3
        self._judge(summary)
        used_recently = ranking.has_fresh or summary.spared[USED]  # and so evictable in a moment
        if self.is_spent and not summary.reaped.count and not used_recently:
            self._pressure.accounts.blocked()
        return summary

    def evict(self) -> Summary | None:
        """Evicts from the last listing as far as the level demands it now; None if it does not. Raises as ``run``."""
        if self._ranking is None or self._needed_bytes() <= 0:
            return None
        summary = self._summary(dry_run=False)
        level = self._pressure.level
        summary.used_before_bytes = level.used_bytes if level is not None else 0
        with self._sweeper.abandoning(summary):
            self._evict(summary)
        self._judge(summary)
        return summary

    def dry_run(self) -> Summary:
        """Finds what a cycle would condemn, and why; writes nothing anywhere. Raises as ``run``."""
        summary = self._summary(dry_run=True)
        with self._timed(summary, "check"):
            self._compare()
        self._leads = True
        ranking = self._rank(summary)
        rows = ranking.take(self._needed_bytes())
        summary.chose(rows)
        summary.used_after_bytes -= int(rows["size"].sum())
        return summary

    def _summary(self, *, dry_run: bool) -> Summary:
        return Summary(dry_run=dry_run, started_s=self._clock.now_s(), shards_count=self._site.shards_count)

    # Check and recover

    def _compare(self) -> None:
        """Does what ``Sweeper.check`` does, without writing the first generation."""
        on_root = read_newest(self._root)
        in_meta = read_generation(self._site.meta, self._site.keys, self._timeout_s)
        if on_root is not None and on_root != in_meta:
            raise RootMismatch(difference(on_root, in_meta))

    # List and rank

    def _rank(self, summary: Summary) -> Ranking:
        """Lists all shards, and ranks what it found."""
        namespaces = Namespaces(self._site.meta, self._site.keys).list(self._timeout_s)
        goals, pinned = self._config.goals(namespaces), self._sweeper.kept().marks
        with self._timed(summary, "survey"):
            began_s = self._clock.now_s()
            ranking = Ranking(goals, began_s, self._site.identity.shard_bits, pinned)
            self._read(summary, ranking)
            ranking.rank((began_s - FRESH_S, self._clock.now_s() + FRESH_S))
            self._parents.check(ranking)
        self._picks.clear()
        self._ranking = ranking
        summary.listed(ranking, namespaces)
        level = self._pressure.level
        if level is not None:
            summary.capacity_bytes, summary.limit_bytes = level.capacity_bytes, self._pressure.accounts.max_bytes
            summary.target_bytes = level.target_bytes
        self._warn(goals)
        return ranking

    def _read(self, summary: Summary, ranking: Ranking) -> None:
        """Lists the root. From then on the level is known."""
        self._pressure.before_listing()
        began_s = self._clock.monotonic_s()
        summary.other_files = other_files(self._root)
        ranking.read(self._root, range(summary.shards_count), each=self._site.each, listed=self._listed)
        listed_bytes = ranking.total.bytes + summary.other_files.bytes
        level = self._pressure.level
        if level is None or ranking.is_whole or listed_bytes > level.used_bytes:
            self._pressure.after_listing(listed_bytes)
        self._listing_s = max(LISTING_S_MIN, self._clock.monotonic_s() - began_s)

    def _warn(self, goals: Goals) -> None:
        if self._warned or goals.ttl_s is not None or self._pressure.level is not None or goals.quotas:
            return
        self._warned = True
        log.warning(
            "gc.no_limit the root does not know its size: only chunks whose writers gave a time to live are deleted; "
            "give --max-bytes or --ttl"
        )

    # Evict

    def _evict(self, summary: Summary) -> None:
        """Evicts slice after slice of the ranking until nothing more is needed, or the ranking is spent.

        First what is due whatever is needed. The next slice begins while the grace of the last one goes on.
        """
        wait_s = self._site.timings.poll_s_min
        while True:
            with self._timed(summary, "plan"):
                plans = self._plans(summary)
            if plans:
                self._sweeper.begin(plans, summary)
            if self._sweeper.advance(summary) or plans:
                wait_s = self._site.timings.poll_s_min
            elif self._sweeper.busy_parts:
                self._site.pause(wait_s)
                summary.spent("grace", wait_s)
                wait_s = min(2 * wait_s, self._site.timings.poll_s_max)
            else:
                return

    def _plans(self, summary: Summary) -> list[SweepPlan]:
        """Makes the next plans of parts that have no sweep in flight."""
        if not self._picks:
            self._picks.extend(self._by_part(self._next_slice()))
        busy, left = self._sweeper.busy_parts, list[tuple[int, Rows]]()
        plans: list[SweepPlan] = []
        while self._picks and len(busy) < PARTS:
            part, rows = self._picks.popleft()
            if part in busy:
                left.append((part, rows))
                continue
            busy.add(part)
            plans.append(SweepPlan(part, victims_of(rows)))
            summary.chose(rows)
        self._picks.extendleft(reversed(left))
        return plans

    def _next_slice(self) -> Rows:
        """Takes the next slice from the ranking: what is due, and more if space is needed."""
        assert self._ranking is not None
        size_bytes: float = self._needed_bytes()
        level = self._pressure.level
        if size_bytes > 0 and level is not None:
            least, most = SLICE_SHARE_MIN * level.headroom_bytes, SLICE_SHARE * max(level.headroom_bytes, size_bytes)
            size_bytes = min(max(size_bytes, least), most)
        return self._ranking.take(size_bytes, CONDEMNED_MAX)

    def _by_part(self, rows: Rows) -> Iterator[tuple[int, Rows]]:
        """Returns them by part."""
        parts = parts_of(rows)
        for part in range(PARTS):
            mine = rows[parts == part]
            for at in range(0, len(mine), VICTIMS_MAX):
                yield part, mine[at : at + VICTIMS_MAX]

    def _needed_bytes(self) -> int:
        """Bytes to evict in the whole root, beyond what is being deleted."""
        level = self._pressure.level
        if level is None or not self._leads:
            return 0
        return level.used_bytes - level.target_bytes - self._sweeper.in_flight_bytes

    # Leftovers and results

    def _remove_leftovers(self, summary: Summary) -> None:
        with self._timed(summary, "orphans"):
            summary.orphans += self._orphans.remove()
            summary.orphans += Counter(trash=self._sweeper.lift_unnamed())

    def _judge(self, summary: Summary) -> None:
        """Notes everything that the cycle had to do and could not."""
        summary.used_after_bytes = max(0, summary.used_before_bytes - summary.reaped.bytes)
        abandoned, left = summary.sweeps["abandoned"], summary.sweeps["left"]
        if abandoned:
            summary.unfinished.append(f"{abandoned} sweeps were abandoned: nodes did not announce them in time")
        if left:
            summary.unfinished.append(f"{left} sweeps are still in flight")
        if summary.orphans["failed"]:
            summary.unfinished.append("some leftovers could not be removed")
        is_last = self._collectors is None or not summary.reaped.count  # else the next cycle begins immediately
        level = self._pressure.level
        if is_last and not summary.spared["gone already"] and level is not None and self.is_spent:
            summary.unfinished.append(
                f"the root's files still take {size(level.used_bytes)}, over the target of {size(level.target_bytes)}: "
                "the rest is pinned or held, was used during the cycle, or needs another cycle"
            )

    @contextmanager
    def _timed(self, summary: Summary, phase: str) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            summary.spent(phase, self._clock.monotonic_s() - began_s)
