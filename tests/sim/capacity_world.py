"""A run in which nodes fill the root of a cluster, and real collectors keep it below its capacity (section 6).

I6: the files never take more than the capacity and 2 % of it, with one credit, or one put if that is larger, of each
node, of each that ended, and of all for each collector that began. The judge adds up the files of the root, and knows
of no counter. It looks once all nodes have a credit. In the end, with all well, no put is refused (I7).
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from kvstore.core.recency import QUANTUM_S
from kvstore.engine.gc_state import ClusterGcState
from kvstore.errors import KVStoreError, Overloaded
from kvstore_gc.capacity import HEADROOM_SHARE_MAX, Pressure
from kvstore_gc.collector import CycleScheduler
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.membership import Collectors
from kvstore_gc.site import Site
from kvstore_gc.threads import Stop
from tests.sim.collector import Collector
from tests.sim.host import Host
from tests.sim.kernel import Kernel, Process
from tests.sim.profiles import Profile
from tests.sim.shared_root import RootPort
from tests.sim.world import COARSE_S, WIND_UP_STEPS, World

PACE_S = 0.05
"""Nodes put as fast as they may, and fill the root within a run."""
FILE_BYTES = 4112
"""The size of each chunk's file."""
INTERVAL_S = 20.0
PROOF_PUTS = 30
"""Puts in the end, none of which is refused."""


class CountingCollector:
    """One collector's process, as ``kvstore_gc.collector.Collector.serve`` puts it together."""

    def __init__(self, world: CapacityWorld, name: str) -> None:
        self.world = world
        self.kernel = world.kernel
        self.process = Process(world.kernel, name, ahead_s=2 * world.kernel.random() - 1, is_collector=True)
        self._stop = Stop()
        site = Site(
            RootPort(world.root, world.faults),
            world.identity,
            world.store.port(world.faults),
            self.process,
            world.ids,
            world.timings,
            pause=self._stop.pause,
        )
        self._collectors = Collectors(site)
        self._pressure = Pressure(site, world.capacity_bytes, self._collectors)
        cycle = Cycle(site, Config(), self._pressure, self._collectors)
        self._service = CycleScheduler(cycle, site, INTERVAL_S, done=lambda summary: world.count("cycles"))

    def start(self) -> CountingCollector:
        """Begins, and goes on until it is killed."""
        self.kernel.spawn(self.process, "main", self._serve)
        return self

    def _serve(self) -> None:
        while True:
            try:
                self._collectors.beat()
                break
            except KVStoreError as error:
                self.kernel.note(f"could not join: {error}")
                self.kernel.sleep(0.5)
        self._pressure.start(self._stop)
        self._service.run()


class CapacityWorld(World):
    """``collectors`` are those that count."""

    wind_up_steps = 4 * WIND_UP_STEPS
    """A collector that counts takes many."""

    def __init__(self, kernel: Kernel, profile: Profile) -> None:
        self.capacity_bytes = profile.capacity_chunks * FILE_BYTES
        self._ended_count = profile.nodes * profile.collectors
        self._is_limited = False
        super().__init__(kernel, profile)
        self.limits = replace(self.limits, quantum_s=QUANTUM_S)  # as collectors expect
        self.pace_s = PACE_S
        self.oracle.grew = self._judge

    # The judge.

    @property
    def allowed_bytes(self) -> int:
        """The most that the files may take now."""
        nodes_count = self.profile.nodes
        credit_bytes = HEADROOM_SHARE_MAX / 2 * self.capacity_bytes / nodes_count
        most_bytes = max(credit_bytes, self.profile.chunks * FILE_BYTES)
        return int(1.02 * self.capacity_bytes + (nodes_count + self._ended_count) * most_bytes)

    def _judge(self) -> None:
        used_bytes = self.oracle.used_bytes
        if not self._is_limited:
            self._is_limited = used_bytes <= self.capacity_bytes and all(map(_has_credit, self.hosts))
        elif used_bytes > self.allowed_bytes:
            self.kernel.fail(
                f"I6: the files take {used_bytes} bytes of {self.capacity_bytes}, {self.allowed_bytes} allowed"
            )

    # What happens.

    def _collector(self) -> CountingCollector:  # type: ignore[override]
        self._made += 1
        return CountingCollector(self, f"g{self._made}").start()

    def _kill_counting(self) -> bool:
        """A collector is killed, and another begins."""
        if self.collectors:
            self._replace(self.kernel.source.choice(self.collectors))
        return bool(self.collectors)

    def _kill_node(self) -> None:
        """A node is killed, and another begins."""
        self._replace(self.kernel.source.choice(self.hosts))

    def _bury(self, victim: Host | Collector) -> None:
        # A new collector counts the writes of a node that has not reported yet from its first report on.
        self._ended_count += 1 if isinstance(victim, Host) else self.profile.nodes
        super()._bury(victim)

    def _tidy(self, janitor: Collector) -> None:
        # With one collector alive puts go on, and none is refused.
        self.collectors.append(self._collector())  # type: ignore[arg-type]
        self.kernel.coarse_s = 0.0
        self._prove_stores()
        self.kernel.coarse_s = COARSE_S
        for collector in list(self.collectors):
            self._bury(collector)
        super()._tidy(janitor)

    def _prove_stores(self) -> None:
        host = self._host()
        self.hosts.append(host)
        while host.member is None or not host.member.node.gc_view.protects:
            self.kernel.sleep(1.0)
        self.kernel.sleep(30.0)  # dead collectors and their record end
        refused = 0
        for _ in range(PROOF_PUTS):
            chain = self.whole_chain() if self.kernel.random() < 0.1 else self.chain()
            try:
                host.member.node.put(chain, 0, lambda index, chain=chain: self.payload(chain, index))  # type: ignore[misc]
            except Overloaded as error:
                self.kernel.note(f"refused: {error}")
                refused += 1
            self.kernel.sleep(0.2)
        if refused:
            self.kernel.fail(f"I7: {refused} of {PROOF_PUTS} puts were refused")


def _has_credit(host: Host) -> bool:
    limit = None if host.member is None else cast(ClusterGcState, host.member.node.gc_view).usage._limit
    return limit is not None and limit.credit_bytes is not None
