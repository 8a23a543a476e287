"""A collector that counts: rounds, watch and signs of ``kvstore-gc --interval``, put together as that program does."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore_gc.rounds import Rounds
from kvstore_gc.service import Service
from kvstore_gc.watch import Duties, Watch

from kvstore.errors import KVStoreError
from kvstore_gc.capacity import Watermarks
from kvstore_gc.config import Config
from kvstore_gc.site import Site
from kvstore_gc.threads import Stop
from tests.sim.kernel import Process
from tests.sim.shared_root import RootPort

if TYPE_CHECKING:
    from tests.sim.bounded_world import BoundedWorld

LEAVE_S = 60.0
"""Nothing hangs here, so the watch always ends."""
BEGIN_S = (5.0, 60.0)
"""The longest time before it begins. In the longer one nodes claim: the word before it is over."""


class CountingCollector:
    """One collector's process, as ``serving.Collector.serve`` puts it together."""

    def __init__(self, world: BoundedWorld, name: str, config: Config) -> None:
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
            generations=world.generations,
        )
        self._watermarks = watermarks = Watermarks(config.max_bytes, config.high, self.process)
        self._duties = duties = Duties.of(site, watermarks, config.max_bytes)
        self._rounds = Rounds(
            site,
            config,
            watermarks,
            shards=duties.collectors.shards,
            unheard=lambda: duties.reports.unheard(site.pause),
            ttl_s=lambda: duties.collectors.smallest_ttl_s,
        )
        self._watch = Watch(site, watermarks, duties)

    def start(self) -> CountingCollector:
        """Begins after a while, and goes on until it is ended."""

        def work() -> None:
            self.kernel.sleep(self.kernel.source.choice(BEGIN_S) * self.kernel.random())
            self._join()
            self._serve()

        self.kernel.spawn(self.process, "main", work)
        return self

    def end(self) -> None:
        """Tells it to end, as SIGTERM does: it takes its word back, and leaves its level (rule S6)."""
        self._stop.ask()

    def _join(self) -> None:
        while not self._stop.asked:
            try:
                self._duties.collectors.beat()
                return
            except KVStoreError as error:
                self.kernel.note(f"could not join: {error}")
                self.kernel.sleep(0.5)

    def _serve(self) -> None:
        world, watermarks = self.world, self._watermarks
        self._watch.start(self._stop)
        Service(
            self._rounds.run,
            interval_s=world.profile.interval_s,
            is_urgent=lambda: watermarks.is_urgent,
            done=lambda summary: world.count("rounds"),
            pause=self._stop.pause,
            clock=self.process,
        ).run()
        self._watch.join(LEAVE_S)
        with suppress(KVStoreError):
            self._duties.room.close(watermarks)
            world.count("collectors that ended in order")
        self._duties.collectors.close()
        world.faults.doomed.append(self.process)
