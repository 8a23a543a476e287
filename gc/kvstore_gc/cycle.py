"""One cycle: check, recover open sweeps, list and rank, evict, remove leftovers (gc/PROTOCOL.md).

It may stop after any step without harm: the next collector recovers whatever is open then.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import Counter, deque
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
from kvstore.meta.namespaces import Namespaces
from kvstore.recency import NS_PER_S, quantum_of
from kvstore.root.generations import read_newest
from kvstore_gc.capacity import Accounts, Publisher
from kvstore_gc.config import Config
from kvstore_gc.execute import Sweeper, SweepReport
from kvstore_gc.goals import Goals
from kvstore_gc.histogram import Tally
from kvstore_gc.ledger import GROUP_MAX
from kvstore_gc.listing import NO_MARKS, Judged, Listed, Marks
from kvstore_gc.orphans import Orphans
from kvstore_gc.plan import Candidates, Decision, Explained, Pick, Ranking, SweepPlan, Victim, explain
from kvstore_gc.site import Site
from kvstore_gc.summary import Example, Summary
from kvstore_gc.survey import Survey, beside, survey

log = logging.getLogger(__name__)

PLANNED_AT_ONCE = 16
BEGUN_AT_ONCE = GROUP_MAX
"""Sweeps that begin before it looks after those in flight."""
VICTIMS_MAX = 131_072
"""Victims condemned at once: their plans are in memory until then."""
EXAMPLES_MAX = 10
SHARE_CHUNKS_MIN = 100_000
"""With this many chunks in its own shards, a collector among others lists only those, and evicts only its share.
Addresses are hashes, so every shard has its share of everything. The cut-offs of two collectors then differ by chance
alone, and by that little a chunk may outlive its parent. A listing of fewer chunks stays in memory."""
SLICE_SHARE = 1 / 4
"""The share of the headroom, or of a larger excess, in one slice of eviction. A slice is cut at one rank; within it
children and parents are condemned in any order."""
SLICE_SHARE_MIN = 1 / 8
"""The least share of the headroom in a slice: with fewer chunks sweeps cost more."""
FRESH_S = 1.0
"""A listing in memory evicts chunks used in its own quantum only for so long, or twice the time that it took: later
their times do not show whether they were used again, and a child that was put since would lose its parent."""


class _Listing:
    """The chunks of the last listing, so that slices need not list them again; None if there were too many."""

    def __init__(self) -> None:
        self.candidates: Candidates | None = Candidates()
        self._count = 0
        self._lock = threading.Lock()

    def keep(self, batch: Listed, judged: Judged) -> None:
        """Keeps some chunks."""
        with self._lock:
            self._count += len(batch.names)
            if self._count > SHARE_CHUNKS_MIN:
                self.candidates = None
            if self.candidates is not None:
                self.candidates.add(batch, judged)


class Cycle:
    """The cycles of one collector. One thread at a time.

    ``shards`` returns which of the given number of shards are this collector's now. ``listed`` is called after each
    shard that was listed. ``publisher`` has nodes report their writes before the first listing; None: no nodes are
    told what they may write.
    """

    def __init__(
        self,
        site: Site,
        config: Config,
        accounts: Accounts,
        *,
        shards: Callable[[int], Sequence[int]],
        listed: Callable[[int], object] = lambda shard: None,
        publisher: Publisher | None = None,
    ) -> None:
        self._site = site
        self._root = site.root
        self._clock = site.clock
        self._timeout_s = site.timeout_s
        self._config = config
        self._accounts = accounts
        self._shards = shards
        self._listed = listed
        self._publisher = publisher
        self._orphans = Orphans(site, accounts)
        self._sweeper = Sweeper(site, check=self._check, deleted=accounts.deleted)
        self._warned = False
        self._is_first = True
        self._may_be_torn = publisher is not None
        """A collector before this one may have been killed within a slice."""
        # The listing that eviction works on.
        self._mine: Sequence[int] = ()
        self._ranking: Ranking | None = None
        self._todo = deque[int]()
        """The shards of the present slice in which nothing was chosen yet ..."""
        self._picks = deque[tuple[Candidates, Pick]]()
        """... and what was chosen in the others."""
        self._listing = _Listing()
        self._listed_s = self._fresh_until_s = 0.0
        self._listed_share = 1.0

    @property
    def waiting_s(self) -> float:
        """Seconds that sweeps in flight have waited for nodes to announce them; 0 if none waits. From any thread."""
        return self._sweeper.waiting_s

    @property
    def is_spent(self) -> bool:
        """True if eviction needs another listing."""
        if self._ranking is None:
            return True
        if not self._mine:
            return self._accounts.excess_bytes > 0  # the others may know better
        return self._ranking.is_spent and self._needed_bytes() > 0

    @property
    def listing_s(self) -> float:
        """The time that the last listing took, or more."""
        return max(FRESH_S, self._fresh_until_s - self._listed_s)

    def run(self) -> Summary:
        """Does a whole cycle. Raises the errors of the root and of the metadata store, and Stopped.

        Raises RootMismatch if the metadata store and the root do not belong together.
        """
        summary = self._summary(dry_run=False)
        report = SweepReport()
        with self._sweeper.abandoning(report):
            with self._timed(summary, "check"):
                self._check()
                self._mine = self._shards(summary.shards_count)
                summary.shards_mine_count = len(self._mine)
            # First all sweeps in flight: who left some is listed for a while yet, and so has its shards (G7).
            self._sweeper.recover(report, None if self._is_first else self._mine)
            self._is_first = False
            self._may_be_torn = self._may_be_torn or report.sweeps["adopted"] > 0
            # Before anything that may take long: no credit is published before the first listing.
            self._rank(summary, self._mine)
            used_bytes = summary.used_before_bytes
            self._evict(summary, report)
            while self._ranking is None and self._publisher is None:  # else the next cycle lists again
                self._rank(summary, self._mine)
                self._evict(summary, report)
            summary.used_before_bytes = used_bytes
            with self._timed(summary, "orphans"):
                summary.orphans += self._orphans.remove(lambda: self._site.pause(0))
                summary.orphans += Counter(trash=self._sweeper.lift_unnamed())
        summary.swept(report)
        self._judge(summary)
        if self._mine and self.is_spent and not summary.reaped.count:
            self._accounts.blocked()
        return summary

    def evict(self) -> Summary | None:
        """Evicts from the last listing as far as the level demands it now; None if it does not. Raises as ``run``."""
        if self._ranking is None or self._needed_bytes() <= 0:
            return None
        summary, report = self._summary(dry_run=False), SweepReport()
        summary.shards_mine_count = len(self._mine)
        level = self._accounts.level
        summary.used_before_bytes = level.used_bytes if level is not None else 0
        with self._sweeper.abandoning(report):
            self._evict(summary, report)
        summary.swept(report)
        self._judge(summary)
        return summary

    def dry_run(self, *, examples_max: int = EXAMPLES_MAX, explain: Sequence[Address] = ()) -> Summary:
        """Finds what a cycle would condemn in all shards, and why; writes nothing anywhere. Raises as ``run``.

        Gives the longest unused chunks as examples, and explains the chunks of the addresses ``explain``.
        """
        summary = self._summary(dry_run=True)
        with self._timed(summary, "check"):
            self._compare()
        summary.shards_mine_count, self._mine = summary.shards_count, range(summary.shards_count)
        ranking = self._rank(summary, range(summary.shards_count))
        ranking.free(self._needed_bytes() - ranking.decision.condemned.bytes)
        decision = ranking.decision
        summary.kept = _kept(decision)
        self._open_slice(decision)
        examples: list[Victim] = []
        while plans := self._plans(decision, summary):
            victims = [victim for plan in plans for victim in plan.victims]
            examples = heapq.nsmallest(examples_max, [*examples, *victims], key=_last_use)
        summary.used_after_bytes -= sum(tally.bytes for tally in summary.chosen.values())
        summary.examples = [_example(victim, decision.now_s) for victim in examples]
        summary.explained = [found for address in explain for found in self._explained(address, decision)]
        missing = {address.hex() for address in explain} - {each.address for each in summary.explained}
        summary.unfinished += [f"{address} is not stored" for address in sorted(missing)]
        return summary

    # Check

    def _summary(self, *, dry_run: bool) -> Summary:
        return Summary(dry_run, self._clock.now_s(), self._site.shards_count)

    def _check(self) -> None:
        """Compares the generations of root and etcd (rule C6); writes the first ones."""
        standing = join_generation(
            self._site.meta,
            self._site.keys,
            self._site.ids,
            read_root=partial(read_newest, self._root),
            publish_root=partial(publish_first, self._root, ids=self._site.ids, clock=self._clock),
            timeout_s=self._timeout_s,
        )
        if isinstance(standing, Foreign):
            raise RootMismatch(standing.why)

    def _compare(self) -> None:
        """Does what ``_check`` does, without writing the first generation."""
        on_root = read_newest(self._root)
        in_meta = read_generation(self._site.meta, self._site.keys, self._timeout_s)
        if on_root is not None and on_root != in_meta:
            raise RootMismatch(difference(on_root, in_meta))

    # List and rank

    def _rank(self, summary: Summary, mine: Sequence[int]) -> Ranking:
        """Lists the shards, only its own ones if they hold many chunks, and ranks what it found."""
        namespaces = Namespaces(self._site.meta, self._site.keys).list(self._timeout_s)
        goals, pinned = self._config.goals(namespaces), self._sweeper.kept().marks
        with self._timed(summary, "survey"):
            found = self._scan(summary, mine, goals, pinned)
        self._listed_share = share = found.shards_count / summary.shards_count
        summary.surveyed(found, round(found.used.bytes / share), namespaces)
        level = self._accounts.level
        if level is not None:
            summary.capacity_bytes, summary.limit_bytes = level.capacity_bytes, self._accounts.limit_bytes
            summary.target_bytes = level.target_bytes
        self._warn(goals)
        self._ranking = Ranking(found, goals.of_share(share), pinned)
        self._open_slice(self._ranking.decision)
        summary.kept = _kept(self._ranking.decision)
        return self._ranking

    def _scan(self, summary: Summary, mine: Sequence[int], goals: Goals, pinned: Marks = NO_MARKS) -> Survey:
        """Lists these shards, or all if they hold few chunks. From then on the level is known."""
        self._accounts.measured(self._root.space())
        is_new = self._publisher is not None and not self._accounts.is_scanned
        unheard = self._publisher.unheard(self._site.pause) if self._publisher and is_new else frozenset()
        mark = self._accounts.before_scan(unheard)
        summary.beside = beside(self._root)
        self._listing, self._listed_s = _Listing(), self._clock.now_s()
        look = partial(
            survey,
            self._root,
            self._site.identity.shard_bits,
            each=self._each_listed,
            now_s=self._listed_s,
            goals=goals,
            pinned=pinned,
        )
        found = look(shards=mine, keep=self._listing.keep)
        if len(mine) < summary.shards_count and found.used.count < SHARE_CHUNKS_MIN:
            found += look(shards=sorted(set(range(summary.shards_count)) - set(mine)))
        share = found.shards_count / summary.shards_count
        self._accounts.after_scan(round(found.used.bytes / share) + summary.beside.bytes, mark)
        self._fresh_until_s = self._listed_s + max(FRESH_S, 2 * (self._clock.now_s() - self._listed_s))
        return found

    def _each_listed(self, count: int, work: Callable[[int], object]) -> None:
        def look(number: int) -> None:
            work(number)
            self._listed(number)

        self._site.each(count, look)

    def _warn(self, goals: Goals) -> None:
        if self._warned or goals.ttl_s is not None or self._accounts.level is not None or goals.quotas:
            return
        self._warned = True
        log.warning(
            "gc.no_limit the root does not know its size: only chunks whose writers gave a time to live are deleted; "
            "give --max-bytes or --ttl"
        )

    # Evict

    def _evict(self, summary: Summary, report: SweepReport) -> None:
        """Evicts slice after slice of the ranking until nothing more is needed, or the ranking is spent.

        First what is expired or over a quota. The next slice begins while the grace of the last one goes on.
        """
        assert self._ranking is not None
        wait_s, has_victims = self._site.timings.poll_s_min, True
        while True:
            if not self._is_open and (has_victims or not self._is_stale) and self._next_slice():
                self._open_slice(self._ranking.decision)
                has_victims = False
            has_begun = self._is_open and self._begin(self._ranking.decision, summary, report)
            has_victims = has_victims or has_begun
            if self._advance(report) or has_begun:
                wait_s = self._site.timings.poll_s_min
                continue
            if not self._sweeper.busy_shards:
                if not has_victims and self._is_stale:
                    self._ranking = None
                return
            self._site.pause(wait_s)
            report.spent("grace", wait_s)
            wait_s = min(2 * wait_s, self._site.timings.poll_s_max)

    def _next_slice(self) -> bool:
        """Cuts the next slice; False if none is needed, or nothing is left."""
        assert self._ranking is not None
        needed_bytes, level = self._needed_bytes(), self._accounts.level
        if level is None:
            return False
        if self._may_be_torn and level.used_bytes > level.target_bytes - level.headroom_bytes:
            # If a collector was killed within a slice, chunks without parents are left: they rank lowest.
            needed_bytes = max(needed_bytes, SLICE_SHARE * level.headroom_bytes)
        self._may_be_torn = False
        if needed_bytes <= 0:
            return False
        least, most = SLICE_SHARE_MIN * level.headroom_bytes, SLICE_SHARE * max(level.headroom_bytes, needed_bytes)
        return self._ranking.free(min(max(needed_bytes, least), most) * self._listed_share)

    @property
    def _is_open(self) -> bool:
        """True if the present slice has chunks that were not condemned yet."""
        return bool(self._todo or self._picks)

    def _open_slice(self, decision: Decision) -> None:
        """Chooses what goes in the next slice: at once from memory, else shard by shard."""
        if not decision.condemned.count:
            return
        if self._listing.candidates is None:
            self._todo.extend(self._mine)
            return
        if self._is_stale:
            decision = replace(decision, used_before_s=quantum_of(self._listed_s, decision.goals.quantum_s))
        candidates = self._listing.candidates
        self._picks.extend((candidates, pick) for pick in candidates.choose(decision))

    @property
    def _is_stale(self) -> bool:
        """True if chunks used in the quantum of the listing stay."""
        return self._listing.candidates is not None and self._clock.now_s() > self._fresh_until_s

    def _needed_bytes(self) -> float:
        """Bytes to evict in the whole root, beyond what is being deleted."""
        level = self._accounts.level
        if level is None or not self._mine:
            return 0.0
        in_flight_bytes = self._sweeper.in_flight_bytes * self._site.shards_count / len(self._mine)
        return level.used_bytes - level.target_bytes - in_flight_bytes

    def _begin(self, decision: Decision, summary: Summary, report: SweepReport) -> bool:
        """Condemns the next chunks of the slice; False if there are none."""
        with self._timed(summary, "plan"):
            plans = self._plans(decision, summary)
        if plans:
            self._sweeper.begin(plans, report)
        return bool(plans)

    def _plans(self, decision: Decision, summary: Summary) -> list[SweepPlan]:
        """Makes the next plans of the slice, of shards that have no sweep in flight, and counts them."""
        plans: list[SweepPlan] = []
        busy, victims_count = self._sweeper.busy_shards, 0
        while len(plans) < BEGUN_AT_ONCE and victims_count < VICTIMS_MAX:
            if not self._picks and self._todo:
                self._choose_in_next(decision)
                continue
            at = next((at for at, (_, pick) in enumerate(self._picks) if pick.shard not in busy), None)
            if at is None:
                break
            self._picks.rotate(-at)
            candidates, pick = self._picks.popleft()
            self._picks.rotate(at)
            busy.add(pick.shard)
            plans.append(candidates.plan(pick, decision))
            victims_count += len(pick.places)
            summary.planned(plans[-1])
        return plans

    def _choose_in_next(self, decision: Decision) -> None:
        """Lists the next shards, and chooses what goes in them."""
        shards = [self._todo.popleft() for _ in range(min(PLANNED_AT_ONCE, len(self._todo)))]
        found: list[tuple[Candidates, list[Pick]] | None] = [None] * len(shards)

        def choose(at: int) -> None:
            shard = shards[at]
            try:
                entries = ((shard, entry) for entry in self._root.list(places.shard_folder(shard)))
                candidates = Candidates.of(entries, decision)
                found[at] = candidates, candidates.choose(decision)
            except (Unavailable, PermissionDenied) as error:
                log.warning("gc.shard_failed shard=%04x %s", shard, error)  # the others can be swept

        self._site.each(len(shards), choose)
        for each in found:
            if each is not None:
                self._picks.extend((each[0], pick) for pick in each[1])

    def _advance(self, report: SweepReport) -> bool:
        began_s = self._sweeper.oldest_s
        if not self._sweeper.advance(report):
            return False
        if began_s is not None:
            self._accounts.evicted(self._clock.monotonic_s() - began_s)
        return True

    # Results

    def _explained(self, address: Address, decision: Decision) -> Iterator[Explained]:
        """Explains why the chunks of an address are kept or condemned."""
        shard = places.shard(address, self._site.identity.shard_bits)
        for entry in self._root.list(places.shard_folder(shard)):
            if entry.name.startswith(address.hex()) and (found := explain(shard, entry, decision)) is not None:
                yield found

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
        # If others share the work at this moment, they judge the rest. The sweep of one that is gone is left to us.
        is_alone = summary.shards_mine_count == summary.shards_count and not summary.spared["gone already"]
        is_last = self._publisher is None or not summary.reaped.count  # else the next cycle goes on at once
        level = self._accounts.level
        if is_alone and is_last and level is not None and self.is_spent:
            summary.unfinished.append(
                f"the root's files still take {size(level.used_bytes)}, over the target of {size(level.target_bytes)}: "
                "the rest is pinned or held, was used meanwhile, or needs another cycle"
            )

    @contextmanager
    def _timed(self, summary: Summary, phase: str) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            summary.spent(phase, self._clock.monotonic_s() - began_s)


def _kept(decision: Decision) -> dict[str, Tally]:
    return {reason.value: tally for reason, tally in decision.expected.items() if not reason.condemns}


def _last_use(victim: Victim) -> int:
    return victim.mtime_ns


def _example(victim: Victim, now_s: float) -> Example:
    idle_s = max(0.0, now_s - victim.mtime_ns / NS_PER_S)
    return Example(
        victim.address.hex(), victim.namespace.hex(), victim.reason.value, victim.size_bytes, round(idle_s, 1)
    )
