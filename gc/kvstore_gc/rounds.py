"""One round: who may run, leftovers, sweeps left open, survey, decision, then the sweeps of the shards that are ours.

Stops after any step without harm: what is open then is adopted by whoever comes next.
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
from kvstore.errors import PermissionDenied, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.meta.generation import Foreign, join_generation, read_generation
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.namespaces import Namespaces
from kvstore.recency import NS_PER_S
from kvstore.root.generations import publish, read_newest
from kvstore.root.identity import RootIdentity
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids
from kvstore_gc.beside import beside
from kvstore_gc.capacity import Watermarks
from kvstore_gc.config import Config
from kvstore_gc.execute import Sweeper
from kvstore_gc.goals import Goals
from kvstore_gc.judged import NO_MARKS
from kvstore_gc.listing import Marks
from kvstore_gc.orphans import Orphans
from kvstore_gc.plan import Decision, Reason, SweepPlan, Victim, decide, explain, plan_shard
from kvstore_gc.safety import Timings
from kvstore_gc.summary import Example, Explained, Summary
from kvstore_gc.survey import Survey, survey
from kvstore_gc.threads import Each

log = logging.getLogger(__name__)

PLANNED_AT_ONCE = 16
BATCH_VICTIMS_MAX = 131_072
"""Of one batch of sweeps, which share one grace: their plans are in memory until it is over."""
BATCH_SHARDS_MAX = 256
EXAMPLES_MAX = 10
SHARE_CHUNKS_MIN = 100_000
"""In its own shards, for a collector among others to look only at those, and to want only their share of the room.
Addresses are hashes, so every shard has its share of everything; the cut-offs of two collectors then differ by chance
alone, and by that little a chunk may outlive its parent."""


class Rounds:
    """The rounds of one collector. One thread at a time.

    ``shards`` says which of the given number of shards are this collector's now. ``pause`` waits and raises Stopped
    when the end is near, ``listed`` is called after each shard that was listed for the survey.  ``unheard`` has nodes
    say what they wrote before a survey begins, and names those that did not; None: nodes are told nothing.
    """

    def __init__(
        self,
        root: Root,
        identity: RootIdentity,
        meta: Meta,
        config: Config,
        watermarks: Watermarks,
        *,
        shards: Callable[[int], Sequence[int]],
        each: Each,
        pause: Callable[[float], object],
        clock: Clock,
        ids: Ids,
        timings: Timings,
        listed: Callable[[int], object] = lambda shard: None,
        unheard: Callable[[], frozenset[SessionId]] | None = None,
    ) -> None:
        self._root = root
        self._identity = identity
        self._meta = meta
        self._keys = Keys(identity.root)
        self._config = config
        self._watermarks = watermarks
        self._shards = shards
        self._each = each
        self._pause = pause
        self._clock = clock
        self._ids = ids
        self._timings = timings
        self._listed = listed
        self._unheard = unheard
        self._orphans = Orphans(root, identity, meta, clock=clock, timings=timings, watermarks=watermarks)
        self._sweeper = Sweeper(
            root, identity, meta, clock=clock, ids=ids, timings=timings, each=each, pause=pause, check=self._join,
            deleted=watermarks.reaped,
        )  # fmt: skip
        self._warned = False

    @property
    def waiting_s(self) -> float:
        """Seconds that sweeps in flight have waited for nodes to announce them; 0 while none does. From any thread."""
        return self._sweeper.waiting_s

    def run(self) -> Summary:
        """A whole round. Raises the errors of the root and of the metadata store, and Stopped.

        Raises RootMismatch where the metadata store and the root do not belong together.
        """
        summary = self._summary(dry_run=False)
        with self._timed(summary, "check"):
            self._join()
            mine = self._shards(summary.shards_count)
        summary.shards_mine_count = len(mine)
        if self._unheard is not None and not self._watermarks.is_surveyed:
            # Until then no node is told what it may write, and what follows may wait for a grace.
            self._surveyed(summary, mine, self._config.goals([], None))
        with self._timed(summary, "orphans"):
            summary.orphans += self._orphans.remove(lambda: self._pause(0))
        summary.swept(self._sweeper.adopt(mine))
        with self._timed(summary, "orphans"):
            summary.orphans += Counter(trash=self._sweeper.lift_unnamed())
        decision = self._decided(summary, mine)
        left = list(mine) if decision.condemned.count else []
        while left:
            left = self._sweep(left, decision, summary)
        self._watermarks.settled()
        self._judge(summary)
        return summary

    def dry_run(self, *, examples_max: int = EXAMPLES_MAX, explain: Sequence[Address] = ()) -> Summary:
        """What a round would condemn in all shards, and why; writes nothing anywhere. Raises as ``run``.

        Gives the longest unused as examples, and explains the chunks of these addresses.
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
        return Summary(dry_run, self._clock.now_s(), 1 << self._identity.shard_bits)

    def _join(self) -> None:
        standing = join_generation(
            self._meta,
            self._keys,
            self._ids,
            read_root=partial(read_newest, self._root),
            publish_root=partial(publish, self._root, ids=self._ids, clock=self._clock),
            timeout_s=self._timings.meta_timeout_s,
        )
        if isinstance(standing, Foreign):
            raise RootMismatch(standing.why)

    def _compare(self) -> None:
        """As ``_join``, without writing the first generation."""
        on_root = read_newest(self._root)
        in_meta = read_generation(self._meta, self._keys, self._timings.meta_timeout_s)
        if on_root is not None and on_root != in_meta:
            raise RootMismatch(
                f"the root is of generation {on_root}, etcd "
                + (f"of {in_meta}" if in_meta else "has none")
                + ": etcd was wiped, restored, or is another cluster's. Nothing can be said until "
                "`kvstore fsck ROOT --adopt --etcd ENDPOINTS` was run (gc/RUNBOOK.md)"
            )

    def _decided(self, summary: Summary, mine: Sequence[int]) -> Decision:
        """Lists the shards, only its own ones where they are many chunks, and decides where to cut."""
        namespaces = Namespaces(self._meta, self._keys).list(self._timings.meta_timeout_s)
        goals = self._config.goals(namespaces, None)
        pinned = self._sweeper.pinned().marks
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
        decision = decide(found, goals.of_share(share), pinned, round(summary.beside.bytes * share))
        summary.kept = {reason.value: tally for reason, tally in decision.expected.items() if not reason.condemns}
        return decision

    def _surveyed(self, summary: Summary, mine: Sequence[int], goals: Goals, pinned: Marks = NO_MARKS) -> Survey:
        """Lists these shards, or all where they are few chunks: from then on the level is known."""
        with self._timed(summary, "survey"):
            self._watermarks.followed(self._root.space())
            mark = self._watermarks.mark(frozenset() if self._unheard is None else self._unheard())
            summary.beside = beside(self._root)
            look = partial(
                survey,
                self._root,
                self._identity.shard_bits,
                each=self._listing,
                now_s=self._clock.now_s(),
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

        self._each(count, look)

    def _warn(self, goals: Goals) -> None:
        if self._warned or goals.ttl_s is not None or goals.max_bytes is not None or goals.quotas:
            return
        self._warned = True
        log.warning(
            "gc.no_limit the root does not know its size: only what its writers gave a time to live is deleted; "
            "give --max-bytes or --ttl"
        )

    def _sweep(self, shards: list[int], decision: Decision, summary: Summary) -> list[int]:
        """Sweeps the first of these shards; those that are left, or have more to take than one sweep can."""
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
        summary.used_after_bytes = max(0, summary.used_after_bytes - report.reaped_bytes)
        # Only where something was taken: what could not be taken now would be chosen again and again.
        again = [plan.shard for plan in batch if Reason.LATER in plan.kept] if report.reaped_count else []
        return shards[taken:] + again

    def _plans(self, shards: Sequence[int], decision: Decision, summary: Summary) -> list[SweepPlan]:
        """The plans of some shards, counted."""
        plans = [SweepPlan(shard, ()) for shard in shards]

        def plan(at: int) -> None:
            try:
                plans[at] = plan_shard(shards[at], self._root.list(places.shard_folder(shards[at])), decision)
            except (Unavailable, PermissionDenied) as error:
                log.warning("gc.shard_failed shard=%04x %s", shards[at], error)  # the others can be swept

        self._each(len(shards), plan)
        for each in plans:
            summary.planned(each)
        return plans

    def _explained(self, address: Address, decision: Decision) -> Iterator[Explained]:
        """Why the chunks of an address are kept or condemned."""
        shard = places.shard(address, self._identity.shard_bits)
        for entry in self._root.list(places.shard_folder(shard)):
            parsed = places.parse_chunk(entry.name)
            verdict = explain(shard, entry, decision) if parsed and parsed[0] == address else None
            if parsed and verdict:
                yield Explained(
                    address.hex(),
                    parsed[1].hex(),
                    verdict.reason.value,
                    verdict.reason.condemns,
                    verdict.idle_s,
                    verdict.weighted_s,
                    verdict.cutoff_s,
                )

    def _judge(self, summary: Summary) -> None:
        """Says what the round had to do and could not."""
        abandoned, left = summary.sweeps["abandoned"], summary.sweeps["left"]
        if abandoned:
            summary.unfinished.append(f"{abandoned} sweeps were abandoned: nodes did not announce them in time")
        if left:
            summary.unfinished.append(f"{left} sweeps are still in flight")
        if summary.orphans["failed"]:
            summary.unfinished.append("some leftovers could not be removed")
        # Where others sweep at the same moment, what is left is for them to judge.
        others = summary.spared["swept by another collector"] + summary.spared["gone already"]
        is_alone = summary.shards_mine_count == summary.shards_count and not others
        left_bytes = summary.used_after_bytes + summary.beside.bytes
        if is_alone and summary.high_bytes is not None and left_bytes > summary.high_bytes:
            summary.unfinished.append(
                f"the root's files still take {left_bytes} bytes, over the high watermark of {summary.high_bytes}: "
                "the rest is pinned, was used meanwhile, or needs another round"
            )

    @contextmanager
    def _timed(self, summary: Summary, phase: str) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            summary.spent(phase, self._clock.monotonic_s() - began_s)


def _last_use(victim: Victim) -> int:
    return victim.mtime_ns


def _example(victim: Victim, now_s: float) -> Example:
    idle_s = max(0.0, now_s - victim.mtime_ns / NS_PER_S)
    return Example(
        victim.address.hex(), victim.namespace.hex(), victim.reason.value, victim.size_bytes, round(idle_s, 1)
    )
