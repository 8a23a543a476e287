"""A collector under test: the real sweeper over victims chosen at random, and the janitor that must leave nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.host.eviction import EvictionVictim
from kvstore.meta.keys import PARTS, part_of
from kvstore_gc.deletion import SweepPlan
from kvstore_gc.execute import SweepReport
from kvstore_gc.leftovers import Orphans
from kvstore_gc.site import Site
from kvstore_gc.threads import Each, Stop, Stopped, Threads, inline
from tests.kit.sweeping import WholeSweeper
from tests.sim.kernel import Process
from tests.sim.shared_root import RootPort

if TYPE_CHECKING:
    from tests.sim.world import World

IDLE_S = 2.0
"""The longest that a collector waits after it found nothing to do."""
AMBUSH_STEPS = 150
AMBUSH_S = 5.0
"""As long as one waits for its moment."""


class Collector:
    """One collector's process."""

    def __init__(self, world: World, name: str, *, threads: bool) -> None:
        self.world = world
        self.kernel = world.kernel
        self.process = Process(world.kernel, name, ahead_s=2 * world.kernel.random() - 1, is_collector=True)
        self.root = RootPort(world.root, world.faults)
        meta = world.store.port(world.faults)
        stop = Stop()
        each: Each = Threads(2, stop).each if threads else inline
        site = Site(
            self.root,
            world.identity,
            meta,
            self.process,
            world.ids,
            world.timings,
            each=each,
            pause=self._pause,
        )
        self.sweeper = WholeSweeper(site)
        self.orphans = Orphans(site)
        self._has_done = False
        self._works: dict[str, Callable[[], None]] = {
            "sweep": self._sweep,
            "adopt": self._adopt,
            "lift": self._lift,
            "orphans": self.remove_orphans,
        }

    def start(self) -> Collector:
        """Collects until the run is wound up."""
        self.kernel.spawn(self.process, "main", self._work, self.world.weight())
        return self

    def _work(self) -> None:
        world, kernel = self.world, self.kernel
        while not world.winding_up:
            kernel.sleep(world.pace_s * kernel.random())
            work = world.choose(world.profile.collect)
            for ambush in world.profile.ambushes:
                if world.faults.strikes(ambush.likely):
                    has_come = kernel.pause(
                        AMBUSH_STEPS, ((ambush.upon,), kernel.source.randrange(ambush.steps)), AMBUSH_S
                    )
                    work = ambush.then if has_come else ""
                    break
            if not work:
                continue
            kernel.note(f"begins {work}")
            self._has_done = False
            try:
                self._works[work]()
            except (KVStoreError, Stopped) as error:
                world.count(f"{work} raised {type(error).__name__}")
                kernel.note(f"{work}: {error}")
            else:
                world.count(f"collector: {work}")
            if not self._has_done:
                kernel.sleep(IDLE_S * kernel.random())

    def _sweep(self) -> None:
        world, source = self.world, self.kernel.source
        share = world.profile.share
        parts = [part for part in range(PARTS) if self.kernel.random() < share]
        plans = [self.plan(part, world.profile.victim) for part in parts]
        if source.random() < 0.3:
            self.kernel.sleep(3 * self.kernel.random())
        self._add(self.sweeper.sweep(plans))

    def _pause(self, seconds: float) -> None:
        """Waits for nodes, or is told to end: then it abandons its sweeps, and another one takes its place."""
        self.kernel.sleep(seconds)
        if not self.world.winding_up and self.world.faults.strikes(self.world.profile.stops):
            raise Stopped

    def _adopt(self) -> None:
        self._add(self.sweeper.adopt())

    def _lift(self) -> None:
        self.world.count("fences lifted", self.sweeper.lift_unnamed())

    def remove_orphans(self) -> None:
        """Removes what nobody will come back for."""
        for kind, count in self.orphans.remove().items():
            self.world.count(f"orphans: {kind}", count)

    def plan(self, part: int, likely: float) -> SweepPlan:
        """Victims of a part, each with that likelihood, whatever the policy would say."""
        victims = []
        for shard in range(1 << self.world.identity.shard_bits):
            for entry in self.root.list(places.shard_folder(shard)):
                parsed = places.parse_chunk(entry.name)
                if parsed and part_of(parsed[0]) == part and entry.stat and self.kernel.random() < likely:
                    victims.append(EvictionVictim(*parsed, entry.stat.size_bytes, entry.stat.mtime_ns))
        return SweepPlan(part, tuple(victims))

    def _add(self, report: SweepReport) -> None:
        self._has_done = bool(report.condemned.count or report.sweeps["adopted"])
        count = self.world.count
        count("chunks reaped", report.reaped.count)
        for outcome in ("adopted", "abandoned", "left"):
            count(f"sweeps {outcome}", report.sweeps[outcome])
        for why, times in report.spared.items():
            count(f"chunks kept: {why}", times)
