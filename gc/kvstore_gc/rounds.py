"""One round: check, leftovers, sweeps left open, survey, decision, then the sweeps of this collector's shards.

It may stop after any step without harm: the next collector adopts whatever is open then.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from kvstore.address import Address
from kvstore.brief import size
from kvstore.errors import PermissionDenied, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.host.takeover import publish_first
from kvstore.meta.generation import Foreign, difference, join_generation, read_generation
from kvstore.meta.keys import SessionId
from kvstore.meta.namespaces import Namespaces
from kvstore.namespace import Namespace
from kvstore.recency import NS_PER_S
from kvstore.root.generations import read_newest
from kvstore_gc.capacity import Watermarks
from kvstore_gc.config import Config
from kvstore_gc.execute import Sweeper
from kvstore_gc.goals import Goals
from kvstore_gc.listing import NO_MARKS, Marks
from kvstore_gc.orphans import Orphans
from kvstore_gc.plan import Decision, Explained, Reason, SweepPlan, Victim, decide, explain, plan_shard
from kvstore_gc.site import Site
from kvstore_gc.summary import Example, Summary
from kvstore_gc.survey import Survey, beside, survey

log = logging.getLogger(__name__)

PLANNED_AT_ONCE = 16
BATCH_VICTIMS_MAX = 131_072
"""Victims in one batch of sweeps, which share one grace: their plans are in memory until it is over."""
BATCH_SHARDS_MAX = 256
EXAMPLES_MAX = 10
SHARE_CHUNKS_MIN = 100_000
"""With this many chunks in its own shards, a collector among others looks only at those, and wants only their share of
the room. Addresses are hashes, so every shard has its share of everything. The cut-offs of two collectors then differ
by chance alone, and by that little a chunk may outlive its parent."""


class Rounds:
    """The rounds of one collector. One thread at a time.

    ``shards`` says which of the given number of shards are this collector's now. ``listed`` is called after each shard
    that was listed for the survey. ``unheard`` has nodes report their writes before a survey begins, and names those
    that did not; None: nodes are told nothing. ``ttl_s`` is the time to live that others ask for.
    """

    def __init__(
        self,
        site: Site,
        config: Config,
        watermarks: Watermarks,
        *,
        shards: Callable[[int], Sequence[int]],
        listed: Callable[[int], object] = lambda shard: None,
        unheard: Callable[[], frozenset[SessionId]] | None = None,
        ttl_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._site = site
        self._root = site.root
        self._timeout_s = site.timeout_s
        self._config = config
        self._watermarks = watermarks
        self._shards = shards
        self._listed = listed
        self._unheard = unheard
        self._ttl_s = ttl_s
        self._orphans = Orphans(site, watermarks)
        self._sweeper = Sweeper(site, check=self._join, deleted=watermarks.reaped)
        self._warned = False
        self._has_adopted = False

    @property
    def waiting_s(self) -> float:
        """Seconds that sweeps in flight have waited for nodes to announce them; 0 if none waits. From any thread."""
        return self._sweeper.waiting_s

    def run(self) -> Summary:
        """Does a whole round. Raises the errors of the root and of the metadata store, and Stopped.

        Raises RootMismatch if the metadata store and the root do not belong together.
        """
        summary = self._summary(dry_run=False)
        with self._timed(summary, "check"):
            self._join()
            mine = self._shards(summary.shards_count)
        summary.shards_mine_count = len(mine)
        if self._unheard is not None and not self._watermarks.is_surveyed:
            # No node is told how much it may write before the first survey, and the next steps may wait for a grace.
            self._surveyed(summary, mine, self._goals([]))
        with self._timed(summary, "orphans"):
            summary.orphans += self._orphans.remove(lambda: self._site.pause(0))
        # In the first round all sweeps in flight: who left some is listed for a while yet, and so has its shards (G7).
        summary.swept(self._sweeper.adopt(mine if self._has_adopted else None))
        self._has_adopted = True
        with self._timed(summary, "orphans"):
            summary.orphans += Counter(trash=self._sweeper.lift_unnamed())
        decision = self._decided(summary, mine)
        left = list(mine) if decision.condemned.count else []
        while left:
            left = self._sweep(left, decision, summary)
        if not summary.spared["held"]:  # else the next round, at once, chooses others instead
            self._watermarks.settled()
        self._judge(summary)
        return summary

    def dry_run(self, *, examples_max: int = EXAMPLES_MAX, explain: Sequence[Address] = ()) -> Summary:
        """Finds what a round would condemn in all shards, and why; writes nothing anywhere. Raises as ``run``.

        Gives the longest unused chunks as examples, and explains the chunks of the addresses ``explain``.
        """
        summary = self._summary(dry_run=True)
        with self._timed(summary, "check"):
            self._compare()
        summary.shards_mine_count = summary.shards_count
        decision = self._decided(summary, range(summary.shards_count))
        examples: list[Victim] = []
        for start in range(0, summary.shards_count if decision.condemned.count else 0, PLANNED_AT_ONCE):
            for plan in self._plans(range(summary.shards_count)[start : start + PLANNED_AT_ONCE], decision, summary):
                examples = heapq.nsmallest(examples_max, [*examples, *plan.victims], key=_last_use)
        summary.used_after_bytes -= sum(tally.bytes for tally in summary.chosen.values())
        summary.examples = [_example(victim, decision.now_s) for victim in examples]
        summary.explained = [found for address in explain for found in self._explained(address, decision)]
        missing = {address.hex() for address in explain} - {each.address for each in summary.explained}
        summary.unfinished += [f"{address} is not stored" for address in sorted(missing)]
        return summary

    def _summary(self, *, dry_run: bool) -> Summary:
        return Summary(dry_run, self._site.clock.now_s(), self._site.shards_count)

    def _join(self) -> None:
        standing = join_generation(
            self._site.meta,
            self._site.keys,
            self._site.ids,
            read_root=partial(read_newest, self._root),
            publish_root=partial(publish_first, self._root, ids=self._site.ids, clock=self._site.clock),
            timeout_s=self._timeout_s,
        )
        if isinstance(standing, Foreign):
            raise RootMismatch(standing.why)

    def _compare(self) -> None:
        """Does what ``_join`` does, without writing the first generation."""
        on_root = read_newest(self._root)
        in_meta = read_generation(self._site.meta, self._site.keys, self._timeout_s)
        if on_root is not None and on_root != in_meta:
            raise RootMismatch(difference(on_root, in_meta))

    def _goals(self, namespaces: Sequence[Namespace]) -> Goals:
        """The goals of the configuration, with the shorter time to live if embedded stores ask for one."""
        goals = self._config.goals(namespaces, None)
        ttls_s = [ttl_s for ttl_s in (goals.ttl_s, self._ttl_s()) if ttl_s is not None]
        return replace(goals, ttl_s=min(ttls_s, default=None))

    def _decided(self, summary: Summary, mine: Sequence[int]) -> Decision:
        """Lists the shards, only its own ones if they hold many chunks, and decides where to cut."""
        namespaces = Namespaces(self._site.meta, self._site.keys).list(self._timeout_s)
        goals = self._goals(namespaces)
        pinned = self._sweeper.kept().marks
        found = self._surveyed(summary, mine, goals, pinned)
        share = found.shards_count / summary.shards_count
        level = self._watermarks.level
        goals = replace(goals, max_bytes=level.capacity_bytes if level else None)
        self._warn(goals)
        if level:
            summary.capacity_bytes, summary.limit_bytes = level.capacity_bytes, self._watermarks.limit_bytes
            summary.high_bytes = int(goals.high * level.capacity_bytes)
            summary.low_bytes = int(goals.low * level.capacity_bytes)
        summary.surveyed(found, round(found.used.bytes / share), namespaces)
        fixed_bytes = summary.beside.bytes + self._watermarks.pending_bytes
        decision = decide(found, goals.of_share(share), pinned, round(fixed_bytes * share))
        summary.kept = {reason.value: tally for reason, tally in decision.expected.items() if not reason.condemns}
        return decision

    def _surveyed(self, summary: Summary, mine: Sequence[int], goals: Goals, pinned: Marks = NO_MARKS) -> Survey:
        """Lists these shards, or all if they hold few chunks. From then on the level is known."""
        with self._timed(summary, "survey"):
            self._watermarks.followed(self._root.space())
            mark = self._watermarks.mark(frozenset() if self._unheard is None else self._unheard())
            summary.beside = beside(self._root)
            look = partial(
                survey,
                self._root,
                self._site.identity.shard_bits,
                each=self._listing,
                now_s=self._site.clock.now_s(),
                goals=goals,
                pinned=pinned,
            )
            found = look(shards=mine)
            if len(mine) < summary.shards_count and found.used.count < SHARE_CHUNKS_MIN:
                found += look(shards=sorted(set(range(summary.shards_count)) - set(mine)))
        share = found.shards_count / summary.shards_count
        self._watermarks.surveyed(round(found.used.bytes / share) + summary.beside.bytes, mark)
        return found

    def _listing(self, count: int, work: Callable[[int], object]) -> None:
        def look(number: int) -> None:
            work(number)
            self._listed(number)

        self._site.each(count, look)

    def _warn(self, goals: Goals) -> None:
        if self._warned or goals.ttl_s is not None or goals.max_bytes is not None or goals.quotas:
            return
        self._warned = True
        log.warning(
            "gc.no_limit the root does not know its size: only chunks whose writers gave a time to live are deleted; "
            "give --max-bytes or --ttl"
        )

    def _sweep(self, shards: list[int], decision: Decision, summary: Summary) -> list[int]:
        """Sweeps the first of these shards. Returns the others, and those with more victims than one sweep can take."""
        batch: list[SweepPlan] = []
        victims_count = taken = 0
        with self._timed(summary, "plan"):
            while taken < min(len(shards), BATCH_SHARDS_MAX) and victims_count < BATCH_VICTIMS_MAX:
                plans = self._plans(shards[taken : taken + PLANNED_AT_ONCE], decision, summary)
                batch += plans
                taken += len(plans)
                victims_count += sum(len(plan.victims) for plan in plans)
        report = self._sweeper.sweep(batch)
        summary.swept(report)
        summary.used_after_bytes = max(0, summary.used_after_bytes - report.reaped.bytes)
        # Only if something was taken: chunks that cannot be taken now would be chosen again and again.
        again = [plan.shard for plan in batch if Reason.LATER in plan.kept] if report.reaped.count else []
        return shards[taken:] + again

    def _plans(self, shards: Sequence[int], decision: Decision, summary: Summary) -> list[SweepPlan]:
        """Makes the plans of some shards, and counts them."""
        plans = [SweepPlan(shard, ()) for shard in shards]

        def plan(at: int) -> None:
            try:
                plans[at] = plan_shard(shards[at], self._root.list(places.shard_folder(shards[at])), decision)
            except (Unavailable, PermissionDenied) as error:
                log.warning("gc.shard_failed shard=%04x %s", shards[at], error)  # the others can be swept

        self._site.each(len(shards), plan)
        for each in plans:
            summary.planned(each)
        return plans

    def _explained(self, address: Address, decision: Decision) -> Iterator[Explained]:
        """Explains why the chunks of an address are kept or condemned."""
        shard = places.shard(address, self._site.identity.shard_bits)
        for entry in self._root.list(places.shard_folder(shard)):
            if entry.name.startswith(address.hex()) and (found := explain(shard, entry, decision)) is not None:
                yield found

    def _judge(self, summary: Summary) -> None:
        """Notes everything that the round had to do and could not."""
        abandoned, left = summary.sweeps["abandoned"], summary.sweeps["left"]
        if abandoned:
            summary.unfinished.append(f"{abandoned} sweeps were abandoned: nodes did not announce them in time")
        if left:
            summary.unfinished.append(f"{left} sweeps are still in flight")
        if summary.orphans["failed"]:
            summary.unfinished.append("some leftovers could not be removed")
        # If others share the work at this moment, they judge the rest. The sweep of one that is gone is left to us.
        is_alone = summary.shards_mine_count == summary.shards_count and not summary.spared["gone already"]
        left_bytes = summary.used_after_bytes + summary.beside.bytes
        if is_alone and summary.high_bytes is not None and left_bytes > summary.high_bytes:
            summary.unfinished.append(
                f"the root's files still take {size(left_bytes)}, over the high watermark of "
                f"{size(summary.high_bytes)}: the rest is pinned, was used meanwhile, or needs another round"
            )

    @contextmanager
    def _timed(self, summary: Summary, phase: str) -> Iterator[None]:
        began_s = self._site.clock.monotonic_s()
        try:
            yield
        finally:
            summary.spent(phase, self._site.clock.monotonic_s() - began_s)


def _last_use(victim: Victim) -> int:
    return victim.mtime_ns


def _example(victim: Victim, now_s: float) -> Example:
    idle_s = max(0.0, now_s - victim.mtime_ns / NS_PER_S)
    return Example(
        victim.address.hex(), victim.namespace.hex(), victim.reason.value, victim.size_bytes, round(idle_s, 1)
    )
