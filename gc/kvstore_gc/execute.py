"""Sweeps, from a plan to the last key: condemn, grace, fence, reap, close (rules G1 to G7).

Any run may stop after any step, and any other may go on from there; nothing here needs to know whether one did.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, RootMismatch
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, incarnation_at
from kvstore.meta.interface import LeaseId, Meta
from kvstore.meta.keys import Keys, SweepId
from kvstore.meta.pins import PinRecord
from kvstore.meta.sweeps import Condemned
from kvstore.root.fence import lift
from kvstore.root.identity import RootIdentity
from kvstore.root.interface import Root
from kvstore.root.twins import list_twins, read_twin
from kvstore.sources import Clock, Ids
from kvstore_gc.grace import Grace, Pinned
from kvstore_gc.ledger import GROUP_MAX, InFlight, Ledger
from kvstore_gc.objects import Deleting
from kvstore_gc.plan import SweepPlan, Victim
from kvstore_gc.reserve import Reserve
from kvstore_gc.safety import Timings
from kvstore_gc.taken import Taken
from kvstore_gc.threads import Each, Stopped
from kvstore_gc.trash import Trash
from kvstore_gc.victims import Condemnation, read_victims, write_victims

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SweepReport:
    """What came of some sweeps. ``kept`` counts victims that were spared after all, by why."""

    condemned_count: int = 0
    condemned_bytes: int = 0
    reaped_count: int = 0
    reaped_bytes: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    sweeps_count: int = 0
    adopted_count: int = 0
    abandoned_count: int = 0
    left_count: int = 0
    """Sweeps left in flight, for whoever adopts them."""
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, other: SweepReport) -> None:
        """Sums both up."""
        for name in ("condemned", "reaped"):
            for unit in ("count", "bytes"):
                key = f"{name}_{unit}"
                setattr(self, key, getattr(self, key) + getattr(other, key))
        for key in ("sweeps_count", "adopted_count", "abandoned_count", "left_count"):
            setattr(self, key, getattr(self, key) + getattr(other, key))
        self.kept += other.kept
        for phase, seconds in other.seconds.items():
            self.spent(phase, seconds)

    def spent(self, phase: str, seconds: float) -> None:
        """Adds to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


class Sweeper:
    """Carries out sweeps on one root. One thread uses it; ``each`` spreads the calls to the root over more.

    ``pause`` waits, and raises Stopped where the collector is to end.  ``check`` raises where root and etcd no longer
    belong together (rule C6); asked once more before anything is taken, because an adoption may come at any time.
    ``deleted`` hears the bytes of each chunk that was deleted, on the thread that did it.

    Raises InvalidRequest where the root can neither be fenced nor delete conditionally: no collector is safe there.
    """

    def __init__(
        self,
        root: Root,
        identity: RootIdentity,
        meta: Meta,
        *,
        clock: Clock,
        ids: Ids,
        timings: Timings,
        each: Each,
        pause: Callable[[float], object],
        check: Callable[[], object] = lambda: None,
        deleted: Callable[[int], object] = lambda size_bytes: None,
    ) -> None:
        if not (root.traits.fenced or root.traits.conditional_remove):
            raise InvalidRequest(
                f"{root.url} can neither fence a collector that was paused, as mounted file systems do, nor delete "
                "on a condition, as some object stores do (kvstore check-root): garbage collection is not safe there"
            )
        self._root = root
        self._shard_bits = identity.shard_bits
        self._clock = clock
        self._ids = ids
        self._timings = timings
        self._each = each
        self._pause = pause
        self._check = check
        self._deleted = deleted
        keys = Keys(identity.root)
        self._ledger = Ledger(meta, keys, ids, timings.meta_timeout_s)
        self._grace = Grace(meta, keys, self._ledger, self._twins, timings.meta_timeout_s, timings.refs_timeout_s)
        self._trash = Trash(root, identity.shard_bits, ids, each)
        self._deleting = Deleting(root, self._ledger, identity.shard_bits, ids, clock, each)
        self._reserve = Reserve(root, ids)
        self._twins_seen: dict[str, bytes] = {}
        self._waits_since_s: float | None = None

    @property
    def waiting_s(self) -> float:
        """Seconds that sweeps in flight have waited for nodes to announce them; 0 while none does. From any thread."""
        since_s = self._waits_since_s
        return 0.0 if since_s is None else self._clock.monotonic_s() - since_s

    def sweep(self, plans: Sequence[SweepPlan]) -> SweepReport:
        """Takes the victims of the plans, as far as nobody holds or pins them, or has used them since.

        Raises Unavailable, the root's errors and Stopped; what is in flight then is adopted by the next run.
        """
        report, started_s = SweepReport(), self._clock.monotonic_s()
        self._reserve.keep()
        sweeps: list[InFlight] = []
        # Spared by G4 anyway; but what is condemned is a miss until the sweep ends, which pinned chunks should not be.
        pinned = self._grace.pinned()
        planned = [kept for plan in plans if (kept := _without(plan, pinned, report)).victims]
        for start in range(0, len(planned), GROUP_MAX):
            sweeps += self._condemn(planned[start : start + GROUP_MAX], report)
        self._spent(report, "condemn", started_s)
        self._finish(sweeps, report)
        return report

    def adopt(self, shards: Iterable[int] | None = None) -> SweepReport:
        """Finishes the sweeps in flight (of these shards) that others have begun and perhaps left (rule G7)."""
        report = SweepReport()
        wanted = None if shards is None else set(shards)
        found = self._ledger.in_flight()
        sweeps = [one for shard, one in sorted(found.items()) if wanted is None or shard in wanted]
        report.adopted_count = len(sweeps)
        self._finish(sweeps, report)
        return report

    def lift_unnamed(self) -> int:
        """Lifts the fence of trash folders that no key names, putting back what is in them (rule F3); how many."""
        if not self._root.traits.fenced:
            return 0
        folders = {places.parse_sweep(entry.name) for entry in self._root.list(places.TRASH)} - {None}
        if not folders:
            return 0
        named: set[bytes | None] = {one.sweep for one in self._ledger.in_flight().values()}
        lifted = 0
        for sweep in sorted(one for one in folders - named if one is not None):
            lifted += lift(self._root, sweep, self._shard_bits, partial(self._is_named, sweep))
        return lifted

    def pinned(self) -> Pinned:
        """What pins protect now, for deciding and for a dry run; only ``sweep`` proves anything. Raises Unavailable."""
        return self._grace.pinned()

    # G1 and G2

    def _condemn(self, plans: Sequence[SweepPlan], report: SweepReport) -> list[InFlight]:
        """Begins the sweeps of some shards with one transaction."""
        records: dict[int, Condemned] = {}
        late_s = self._timings.condemn_s_max
        # All looks first: a folder that no key names yet is lifted by any node that joins meanwhile.
        seen = [(plan.shard, victims) for plan in plans if (victims := self._look(plan.victims, report))]
        began_s = self._clock.monotonic_s()
        for shard, victims in seen:
            if self._clock.monotonic_s() - began_s > late_s / 2 and records:
                break  # a slow root: name the plans that are written while they still count as young
            try:
                records[shard] = self._prepare(victims)
            except Overloaded:
                if not self._reserve.spend():
                    if records:
                        break  # what there was room for makes room
                    raise
                records[shard] = self._prepare(victims)
        # A plan that no key names goes by its age: whoever took so long must not name it any more. One that was paused
        # between this look and the transaction names a plan that may be gone, and its sweep takes nothing.
        in_time = partial(self._is_within, began_s, late_s)
        begun = self._ledger.condemn(records, in_time) if records else []
        report.sweeps_count += len(begun)
        sizes_bytes = {shard: sum(one.size_bytes for one in victims) for shard, victims in seen}
        for one in begun:
            report.condemned_count += one.record.victims_count
            report.condemned_bytes += sizes_bytes[one.shard]
        for shard in records.keys() - {one.shard for one in begun}:
            # Another collector sweeps this shard, or it took too long. Nobody knows of our folder: it only has to go.
            record = records[shard]
            report.kept["swept by another collector" if in_time() else "condemned too slowly"] += record.victims_count
            self._drop(record)
        return begun

    def _prepare(self, victims: Sequence[Condemnation]) -> Condemned:
        """Rule G1: the plan and the folder of a new sweep. Leaves neither where it raises the root's errors."""
        sweep = SweepId(self._ids.fresh())
        checksum = write_victims(self._root, sweep, victims, self._ids, self._clock)
        record = Condemned.of_victims(sweep, checksum, [one.address for one in victims])
        try:
            if self._root.traits.fenced:
                self._trash.open(sweep)
        except KVStoreError:
            self._drop(record)
            raise
        return record

    def _look(self, victims: Sequence[Victim], report: SweepReport) -> list[Condemnation]:
        """Which publication each victim is, leaving out those that were used since they were listed."""
        found: list[Condemnation | None] = [None] * len(victims)
        failed: list[KVStoreError] = []
        gone: list[Victim] = []

        def look(index: int) -> None:
            victim = victims[index]
            try:
                seen = self._root.look(victim.name, FIXED_BYTES)
            except KVStoreError as error:
                failed.append(error)  # one bad file must not keep all others from being collected
                return
            if seen is None:
                gone.append(victim)
            elif seen.stat.mtime_ns <= victim.mtime_ns:
                incarnation = incarnation_at(seen.prefix)
                found[index] = Condemnation(victim.address, victim.namespace, incarnation, seen.stat.size_bytes)

        self._each(len(victims), look)
        if failed:
            log.warning("sweep.unreadable count=%d such as: %s", len(failed), failed[0])
        report.kept["cannot be read"] += len(failed)
        report.kept["gone already"] += len(gone)
        report.kept["used since it was listed"] += found.count(None) - len(failed) - len(gone)
        return [one for one in found if one is not None]

    # G4 to G7

    def _finish(self, sweeps: Sequence[InFlight], report: SweepReport) -> None:
        """Brings sweeps in flight to their end: waits for their grace, reaps, closes."""
        self._waits_since_s = self._clock.monotonic_s() if sweeps else None
        try:
            self._finish_all(sweeps, report)
        finally:
            self._waits_since_s = None

    def _finish_all(self, sweeps: Sequence[InFlight], report: SweepReport) -> None:
        left, began_s = list(sweeps), self._clock.monotonic_s()
        wait_s = self._timings.poll_s_min
        lagging: dict[LeaseId, float] = {}
        while left:
            now_s = self._clock.monotonic_s()
            look = self._grace.look(left)
            left = look.waiting
            # Each by itself: a session that has just begun lags too, and its node relies on it.
            lagging = {one.lease: lagging.get(one.lease, now_s) for one in look.laggards}
            if look.due:
                self._check()
                ready, pinned = self._grace.decide(look.due)
                self._reap(ready, pinned, report)
                # Those that were due and not ready after all have changed meanwhile: the next look tells how.
                done = {one.sweep for one in ready}
                left += [one for one in look.due if one.sweep not in done]
                self._waits_since_s = self._clock.monotonic_s()  # what is deleted is no wait
                continue
            if not left:
                break
            lag_max_s = self._timings.announce_lag_max_s
            self._grace.revoke([one for one in look.laggards if now_s - lagging[one.lease] > lag_max_s])
            if now_s - began_s > self._timings.grace_max_s:
                self._abandon(left, report)
                break
            try:
                self._pause(wait_s)
            except Stopped:
                self._abandon(left, report)
                raise
            self._spent(report, "grace", self._clock.monotonic_s() - wait_s)
            wait_s = min(2 * wait_s, self._timings.poll_s_max)

    def _reap(self, sweeps: Sequence[InFlight], pinned: Pinned, report: SweepReport) -> None:
        """Takes what is not pinned, and closes the sweeps whose fence is up."""
        began_s = self._clock.monotonic_s()
        closing = []
        for sweep in sweeps:
            victims = read_victims(self._root, sweep.sweep, sweep.record.plan_checksum)
            if victims is None and not self._is_named(sweep.sweep):
                continue  # another run has closed it meanwhile
            if victims is None:
                log.warning("sweep.no_plan sweep=%s: it takes nothing", sweep.sweep.hex())
            spared = [one for one in victims or () if one.address in pinned]
            report.kept["pinned"] += len(spared)
            taken = Taken(self._deleted)
            try:
                if self._root.traits.fenced:
                    ended = self._trash.reap(sweep, victims or (), pinned, taken)
                else:
                    ended = self._deleting.reap(sweep, victims, pinned, taken)
            except KVStoreError as error:
                log.warning("sweep.left shard=%04x sweep=%s: %s", sweep.shard, sweep.sweep.hex(), error)
                ended = False
            if taken.failed_count:
                log.warning("sweep.refused count=%d such as: %s", taken.failed_count, taken.failure)
                report.kept["cannot be taken"] += taken.failed_count
            report.reaped_count += len(taken.reaped)
            report.reaped_bytes += sum(one.size_bytes for one in taken.reaped)
            report.kept["published anew"] += taken.restored_count
            if ended:
                closing.append(sweep)
            else:
                report.left_count += 1
        self._spent(report, "reap", began_s)
        self._close(closing, report)

    def _close(self, sweeps: Sequence[InFlight], report: SweepReport) -> None:
        began_s = self._clock.monotonic_s()
        for start in range(0, len(sweeps), GROUP_MAX):
            self._ledger.close(sweeps[start : start + GROUP_MAX])
        self._remove_plans(sweeps)
        self._spent(report, "close", began_s)

    def _abandon(self, sweeps: Sequence[InFlight], report: SweepReport) -> None:
        """Closes sweeps without taking anything, so that what they condemned is in use again.

        One in which another run has taken something already, or made its list final, is left to that run.
        """
        closing = []
        for sweep in sweeps:
            folder = places.trash_folder(sweep.sweep)
            if not self._root.traits.fenced or self._root.remove_folder(folder, durable=True):
                closing.append(sweep)
        for start in range(0, len(closing), GROUP_MAX):
            self._ledger.abandon(closing[start : start + GROUP_MAX])
        ended_count = self._remove_plans(closing)
        log.warning("sweep.abandoned count=%d: nodes did not announce in time", ended_count)
        report.abandoned_count += ended_count
        report.left_count += len(sweeps) - ended_count

    def _remove_plans(self, sweeps: Sequence[InFlight]) -> int:
        """Removes the plans of those of the sweeps that are over; how many are."""
        named = {one.sweep for one in self._ledger.in_flight().values()} if sweeps else set()
        over = [one for one in sweeps if one.sweep not in named]
        for sweep in over:
            self._root.remove(places.plan(sweep.sweep, sweep.record.plan_checksum))
        return len(over)

    def _drop(self, record: Condemned) -> None:
        """Takes back what was made for a sweep that did not begin."""
        if self._root.traits.fenced:
            self._root.remove_folder(places.trash_folder(record.sweep), durable=True)
        self._root.remove(places.plan(record.sweep, record.plan_checksum))

    def _is_within(self, since_s: float, seconds: float) -> bool:
        return self._clock.monotonic_s() - since_s <= seconds

    def _is_named(self, sweep: bytes) -> bool:
        return any(one.sweep == sweep for one in self._ledger.in_flight().values())

    def _twins(self) -> list[bytes]:
        """What the pins protect that have a twin on the root (rule C5). Contents never change, so each is read once."""
        found: dict[str, bytes] = {}
        for name in list_twins(self._root):
            packed = self._twins_seen.get(name)
            if packed is None:
                content = read_twin(self._root, name)
                if content is None:
                    if name in list_twins(self._root):
                        raise RootMismatch(f"{name} cannot be read as a pin's twin: see gc/RUNBOOK.md")
                    continue  # removed meanwhile: its pin is gone
                packed = PinRecord.from_bytes(content, name).packed
            found[name] = packed
        self._twins_seen = found
        return list(found.values())

    def _spent(self, report: SweepReport, phase: str, since_s: float) -> None:
        report.spent(phase, self._clock.monotonic_s() - since_s)


def _without(plan: SweepPlan, pinned: Pinned, report: SweepReport) -> SweepPlan:
    """A plan without what is pinned."""
    free = tuple(victim for victim in plan.victims if victim.address not in pinned)
    report.kept["pinned"] += len(plan.victims) - len(free)
    return plan if len(free) == len(plan.victims) else replace(plan, victims=free)
