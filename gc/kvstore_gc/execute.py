"""Sweeps, from a plan to the last key: condemn, grace, fence, reap, close (rules G1 to G7).

Any run may stop after any step, and any other may go on from there. Nothing here needs to know whether one did.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, RootMismatch
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, incarnation_at
from kvstore.format.places import Name
from kvstore.host.eviction import EvictionVictim
from kvstore.host.tables import publish_first
from kvstore.meta.cluster import Foreign, join_generation
from kvstore.meta.keys import SweepId
from kvstore.meta.store import LeaseId
from kvstore.meta.sweeps import Condemned
from kvstore.root.fences import keep_reserve, lift_unnamed, with_reserve
from kvstore.root.identity import read_newest
from kvstore_gc.capacity import Pressure
from kvstore_gc.deletion import (
    Condemnation,
    Deleting,
    SweepOutcome,
    SweepPlan,
    Trash,
    read_victims,
    write_victims,
)
from kvstore_gc.grace import Grace, Look, Spared
from kvstore_gc.ledger import InFlight, SweepStore
from kvstore_gc.rank import CountAndBytes
from kvstore_gc.site import Site
from kvstore_gc.threads import Stopped

log = logging.getLogger(__name__)

SAID_S = 5.0
"""A wait for nodes that is longer is said, once."""
STOPPING = "this collector was asked to stop"

Found = dict[int, list[Condemnation]]
USED = "used since it was listed"
SPARED = (
    *("cannot be read", "cannot be taken", "gone already", "held", "pinned", "published anew"),
    *("swept by another collector", USED),
)
"""The reasons by which ``SweepReport.spared`` counts."""


@dataclass(slots=True)
class SweepReport:
    """The outcome of some sweeps. ``spared`` counts victims that were not deleted after all, by why."""

    condemned: CountAndBytes = field(default_factory=CountAndBytes)
    reaped: CountAndBytes = field(default_factory=CountAndBytes)
    spared: Counter[str] = field(default_factory=Counter)
    sweeps: Counter[str] = field(default_factory=Counter)
    """Sweeps that were begun, adopted, abandoned (closed without taking anything), or left in flight."""
    seconds: dict[str, float] = field(default_factory=dict)

    def spent(self, phase: str, seconds: float) -> None:
        """Adds to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


class Sweeper:
    """Carries out several sweeps on one root in parallel. One thread uses it.

    Raises InvalidRequest if the root can neither be fenced nor delete conditionally: no collector is safe there.
    """

    def __init__(self, site: Site, pressure: Pressure | None = None) -> None:
        traits = site.root.traits
        if not (traits.fenced or traits.conditional_remove):
            raise InvalidRequest(
                f"{site.root.url} can neither fence a collector that was paused, as mounted file systems do, nor "
                "delete on a condition, as some object stores do (kvstore check-root): garbage collection is not safe "
                "there"
            )
        self._site = site
        self._root = site.root
        self._clock = site.clock
        self._timings = site.timings
        self._pressure = pressure
        self._ledger = SweepStore(site)
        self._grace = Grace(site, self._ledger)
        self._trash = Trash(site)
        self._deleting = Deleting(site, self._ledger)
        self._flight: list[InFlight] = []
        """Sweeps that this collector follows."""
        self._begun_s: dict[SweepId, float] = {}
        self._sizes_bytes: dict[SweepId, int] = {}
        """Bytes that it condemned in each."""
        self._lags_since_s: dict[tuple[LeaseId, int], float] = {}
        self._waits_since_s: float | None = None
        self._said_wait = False

    @property
    def waiting_s(self) -> float:
        """Seconds that sweeps in flight have waited for nodes to announce them; 0 if none waits. From any thread."""
        since_s = self._waits_since_s
        return 0.0 if since_s is None else self._clock.monotonic_s() - since_s

    @property
    def busy_parts(self) -> set[int]:
        """The parts of its sweeps in flight: no other sweep of them can begin."""
        return {one.part for one in self._flight}

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that its sweeps in flight may still delete."""
        return sum(self._sizes_bytes.get(one.sweep, 0) for one in self._flight)

    def check(self) -> None:
        """Compares the generations of root and etcd (rule C6); writes the first ones. Raises RootMismatch."""
        standing = join_generation(
            self._site.meta,
            self._site.keys,
            self._site.ids,
            read_root=partial(read_newest, self._root),
            publish_root=partial(publish_first, self._root, ids=self._site.ids, clock=self._clock),
            timeout_s=self._site.timeout_s,
        )
        if isinstance(standing, Foreign):
            raise RootMismatch(standing.why)

    def recover(self, report: SweepReport) -> None:
        """Follows the sweeps in flight, those of other collectors too. Raises Unavailable."""
        self._flight = [one for _, one in sorted(self._ledger.in_flight().items())]
        now_s = self._clock.monotonic_s()
        self._begun_s = {one.sweep: now_s for one in self._flight}
        self._lags_since_s.clear()
        self._wait_from(now_s)
        report.sweeps["adopted"] += len(self._flight)

    @contextmanager
    def abandoning(self, report: SweepReport) -> Iterator[None]:
        """Abandons the sweeps in flight if the body raises Stopped."""
        try:
            yield
        except Stopped:
            named = self._named() if self._flight else set()
            self._abandon([one for one in self._flight if one.sweep in named], report, STOPPING)
            self._flight = []
            raise

    def lift_unnamed(self) -> int:
        """Lifts the fence of trash folders that no key names, and puts their files back (rule F3); returns how many."""
        if not self._root.traits.fenced:
            return 0
        return lift_unnamed(self._root, self._site.identity.shard_bits, self._named)

    def kept(self) -> Spared:
        """The addresses that are pinned or were held just now: advice, only ``sweep`` proves it. Raises Unavailable."""
        return self._grace.kept()

    # G1 and G2

    def begin(self, plans: Sequence[SweepPlan], report: SweepReport) -> None:
        """Condemns the victims of the plans. Raises Unavailable, the root's errors and Stopped."""
        started_s = self._clock.monotonic_s()
        keep_reserve(self._root, self._site.ids)
        # Spared by G4 anyway; but a condemned chunk is a miss until the sweep ends, which pinned chunks should not be.
        pinned = self._grace.pinned()
        planned = [kept for plan in plans if (kept := _without(plan, pinned, report)).victims]
        was_idle = not self._flight
        begun = self._condemn(planned, report)
        self._flight += begun
        self._begun_s |= dict.fromkeys((one.sweep for one in begun), started_s)
        if was_idle:
            self._wait_from(self._clock.monotonic_s())
        self._spent(report, "condemn", started_s)

    def _condemn(self, plans: Sequence[SweepPlan], report: SweepReport) -> list[InFlight]:
        """Begins the sweeps of some parts with one transaction."""
        # Check all victims before making folders: any node that joins lifts a folder that no key names yet.
        seen = unused(self._site, plans, report.spared)
        records = self._prepare_all(seen)
        begun = self._ledger.condemn(records) if records else []
        report.sweeps["begun"] += len(begun)
        for one in begun:
            size_bytes = sum(victim.size_bytes for victim in seen[one.part])
            report.condemned += CountAndBytes(one.record.victims_count, size_bytes)
            self._sizes_bytes[one.sweep] = size_bytes
        for part in records.keys() - {one.part for one in begun}:
            # Another collector sweeps this part. No other process knows our folder: remove it.
            report.spared["swept by another collector"] += records[part].victims_count
            self._take_back(records[part])
        return begun

    def _prepare_all(self, seen: dict[int, list[Condemnation]]) -> dict[int, Condemned]:
        """Prepares the sweeps of some parts: all of them, or as many as there is room for."""
        records: dict[int, Condemned] = {}
        staging = self._site.ids.fresh()
        for number, (part, victims) in enumerate(seen.items()):
            staged = places.staged(staging, number)
            try:
                records[part] = with_reserve(self._root, partial(self._prepare, victims, staged))
            except Overloaded:
                if not records:
                    raise
                break  # the sweeps that there was space for make more
        if seen:
            self._root.remove_folder(places.staging_folder(staging))
        return records

    def _prepare(self, victims: Sequence[Condemnation], staged: Name) -> Condemned:
        """Rule G1: the plan and the folder of a new sweep. Leaves neither behind if it raises the root's errors."""
        sweep = SweepId(self._site.ids.fresh())
        checksum = write_victims(self._root, sweep, victims, staged, self._clock)
        record = Condemned.of_victims(sweep, checksum, [one.address for one in victims])
        try:
            if self._root.traits.fenced:
                self._trash.open(sweep)
        except KVStoreError:
            self._take_back(record)
            raise
        return record

    # G4 to G7

    def advance(self, report: SweepReport) -> bool:
        """Reaps and closes the sweeps whose grace is over; False if none is. Raises Unavailable, the root's errors.

        Abandons sweeps whose grace does not end.
        """
        if not self._flight:
            return False
        look = self._grace.look(self._flight)
        self._flight = [*look.due, *look.waiting]
        self._revoke_lagging(look)
        if look.due:
            self.check()  # an adoption may have come since the cycle began
            ready, pinned, held = self._grace.decide(look.due)
            self._reap(ready, pinned, held, report)
            keep_reserve(self._root, self._site.ids)  # there is room for it again
            # Sweeps that were due but are not ready have changed since the look: the next look sees how.
            self._drop(ready)
            self._wait_from(self._clock.monotonic_s())  # deleting does not count as waiting
            return True
        self._warn_of_wait(look)
        began_before_s = self._clock.monotonic_s() - self._timings.grace_max_s
        late = [one for one in self._flight if self._begun_s[one.sweep] < began_before_s]
        if late:
            self._abandon(late, report, "nodes did not announce in time")
        self._drop(late)
        return False

    def _drop(self, ended: Sequence[InFlight]) -> None:
        """Forgets sweeps that have ended, and those that others closed."""
        over = {one.sweep for one in ended}
        self._flight = [one for one in self._flight if one.sweep not in over]
        left = {one.sweep for one in self._flight}
        self._begun_s = {sweep: begun_s for sweep, begun_s in self._begun_s.items() if sweep in left}
        self._sizes_bytes = {sweep: size for sweep, size in self._sizes_bytes.items() if sweep in left}
        if not left:
            self._waits_since_s = None

    def _wait_from(self, now_s: float) -> None:
        self._waits_since_s = now_s if self._flight else None
        self._said_wait = False

    def _warn_of_wait(self, look: Look) -> None:
        if look.waiting and not self._said_wait and self.waiting_s >= SAID_S:
            self._said_wait = True
            log.warning(
                "sweep.waits sweeps=%d sessions=%d for_s=%g: nodes hang, or look for chunks since before it began",
                *(len(look.waiting), len({lease for lease, _ in look.laggards}), SAID_S),
            )

    def _revoke_lagging(self, look: Look) -> None:
        """Revokes sessions that lag too long, unless a sweep can do without them."""
        now_s = self._clock.monotonic_s()
        # Each by itself: a session that has just begun lags too, and its node relies on it. And behind each sweep by
        # itself: during unbroken eviction a session that announces all in time is always behind on the newest one.
        since_s = {each: self._lags_since_s.get(each, now_s) for each in look.laggards}
        self._lags_since_s = since_s
        if not look.due:
            lag_max_s = self._timings.announce_lag_max_s
            late = {one.lease: one for each, one in look.laggards.items() if now_s - since_s[each] > lag_max_s}
            self._grace.revoke(list(late.values()))

    def _reap(self, sweeps: Sequence[InFlight], pinned: Spared, held: Spared, report: SweepReport) -> None:
        """Takes condemned chunks that are neither pinned nor held, and closes the sweeps whose fence is up."""
        began_s = self._clock.monotonic_s()
        closing, spared, lock = [], pinned | held, threading.Lock()

        def reap(number: int) -> None:
            sweep = sweeps[number]
            victims = self._read_plan(sweep)
            if victims is None and sweep.sweep not in self._named():
                return  # another run has closed it already
            if victims is None:
                log.warning("sweep.no_plan sweep=%s: it takes nothing", sweep.sweep.hex())
            taken = SweepOutcome(self._pressure)
            has_ended = False
            try:
                if self._root.traits.fenced:
                    has_ended = self._trash.reap(sweep, victims or (), spared, taken)
                else:
                    has_ended = self._deleting.reap(sweep, victims, spared, taken)
            except KVStoreError as error:
                log.warning("sweep.left part=%d sweep=%s: %s", sweep.part, sweep.sweep.hex(), error)
            if taken.failed_count:
                log.warning("sweep.refused count=%d such as: %s", taken.failed_count, taken.failure)
            with lock:
                if has_ended:
                    closing.append(sweep)
                else:
                    report.sweeps["left"] += 1
                report.spared["pinned"] += sum(one.address in pinned for one in victims or ())
                report.spared["held"] += sum(one.address in held and one.address not in pinned for one in victims or ())
                report.spared["cannot be taken"] += taken.failed_count
                report.spared["published anew"] += taken.restored_count
                report.reaped += CountAndBytes(len(taken.reaped), sum(one.size_bytes for one in taken.reaped))

        # Small sweeps run in parallel; so do the deletions of a large one.
        self._site.each(len(sweeps), reap)
        self._spent(report, "reap", began_s)
        began_s = self._clock.monotonic_s()
        self._close(closing)
        self._spent(report, "close", began_s)

    def _read_plan(self, sweep: InFlight) -> Sequence[Condemnation] | None:
        """The victims of a sweep; None if they cannot be read, for any reason: a bad disk would keep it for ever."""
        try:
            return read_victims(self._root, sweep.sweep, sweep.record.plan_checksum)
        except KVStoreError as error:
            log.warning("sweep.plan_unreadable sweep=%s: %s", sweep.sweep.hex(), error)
            return None

    def _close(self, sweeps: Sequence[InFlight]) -> None:
        self._ledger.close(sweeps)
        for sweep in sweeps:
            self._root.remove(places.plan(sweep.sweep, sweep.record.plan_checksum))

    def _abandon(self, sweeps: Sequence[InFlight], report: SweepReport, why: str) -> None:
        """Closes sweeps without taking anything more, so that their chunks are in use again.

        A sweep in which another run has taken something, or whose list it made final, is left to that run.
        """
        closing = []
        for sweep in sweeps:
            folder = places.trash_folder(sweep.sweep)
            if not self._root.traits.fenced or self._root.remove_folder(folder, durable=True):
                closing.append(sweep)
        self._ledger.abandon(closing)
        ended_count = self._remove_plans(closing)
        if sweeps:
            log.warning("sweep.abandoned count=%d left=%d: %s", ended_count, len(sweeps) - ended_count, why)
        report.sweeps["abandoned"] += ended_count
        report.sweeps["left"] += len(sweeps) - ended_count

    def _remove_plans(self, sweeps: Sequence[InFlight]) -> int:
        """Removes the plans of those of the sweeps that are over; how many are."""
        named = self._named() if sweeps else set()
        over = [one for one in sweeps if one.sweep not in named]
        for sweep in over:
            self._root.remove(places.plan(sweep.sweep, sweep.record.plan_checksum))
        return len(over)

    def _take_back(self, record: Condemned) -> None:
        """Takes back the folder and plan of a sweep that did not begin."""
        if self._root.traits.fenced:
            self._root.remove_folder(places.trash_folder(record.sweep), durable=True)
        self._root.remove(places.plan(record.sweep, record.plan_checksum))

    def _named(self) -> set[bytes]:
        """The sweeps in flight. Raises Unavailable."""
        return {one.sweep for one in self._ledger.in_flight().values()}

    def _spent(self, report: SweepReport, phase: str, since_s: float) -> None:
        report.spent(phase, self._clock.monotonic_s() - since_s)


def _without(plan: SweepPlan, pinned: Spared, report: SweepReport) -> SweepPlan:
    """A plan without its pinned victims."""
    free = [victim for victim in plan.victims if victim.address not in pinned]
    report.spared["pinned"] += len(plan.victims) - len(free)
    return plan if len(free) == len(plan.victims) else replace(plan, victims=free)


def unused(site: Site, plans: Sequence[SweepPlan], spared: Counter[str]) -> Found:
    """Returns the publications of the victims not used since they were listed, by part; counts the others.

    A use of a chunk is a use of its parents too, but they may have been looked at before it. So if a use is seen, the
    remaining victims are checked again: a chunk that stays keeps its parents.
    """
    victims = {plan.part: plan.victims for plan in plans}
    used_before = spared[USED]
    found = _look_all(site, victims, spared)
    if spared[USED] > used_before:
        left = {part: {one.address for one in seen} for part, seen in found.items()}
        again = {part: [one for one in victims[part] if one.address in left[part]] for part in left}
        found = _look_all(site, again, spared)
    return found


def _look_all(site: Site, listed: Mapping[int, Sequence[EvictionVictim]], spared: Counter[str]) -> Found:
    victims = [(part, victim) for part, some in listed.items() for victim in some]
    found: list[Condemnation | None] = [None] * len(victims)
    failed: list[KVStoreError] = []
    gone: list[EvictionVictim] = []

    def look(index: int) -> None:
        victim = victims[index][1]
        try:
            name = places.chunk(victim.address, victim.namespace, site.identity.shard_bits)
            seen = site.root.look(name, FIXED_BYTES)
        except KVStoreError as error:
            failed.append(error)  # one bad file must not keep all others from being collected
            return
        if seen is None:
            gone.append(victim)
        elif seen.stat.mtime_ns <= victim.mtime_ns:
            incarnation = incarnation_at(seen.prefix)
            found[index] = Condemnation(victim.address, victim.namespace, incarnation, seen.stat.size_bytes)

    site.each(len(victims), look)
    if failed:
        log.warning("sweep.unreadable count=%d such as: %s", len(failed), failed[0])
    spared["cannot be read"] += len(failed)
    spared["gone already"] += len(gone)
    spared[USED] += found.count(None) - len(failed) - len(gone)
    unused: Found = {}
    for (part, _), one in zip(victims, found, strict=True):
        if one is not None:
            unused.setdefault(part, []).append(one)
    return unused
