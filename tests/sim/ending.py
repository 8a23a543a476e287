"""The end of a run: faults stop, whoever lives goes on, and a fresh collector must leave nothing behind (I5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.places import Name
from tests.sim.collector import Collector
from tests.sim.faults import Rates

if TYPE_CHECKING:
    from tests.sim.world import World

COARSE_S = 4.5
"""Less than a third of a session's ttl: so sessions live, and time passes in few steps."""
STEPS_MAX = 30_000
ROUNDS_MAX = 25
PINS_END_S = 70.0


class Ending:
    """Winds one run up. Nodes and collectors are dead by then, or go on: sweeps must end either way."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kernel = world.kernel
        self._is_done = False

    def run(self) -> None:
        """Until everything is tidy and every node is well; the kernel has the verdict."""
        kernel, world = self._kernel, self._world
        kernel.note("WINDING UP")
        world.winding_up = True
        world.saboteur.rest()
        world.faults.rates = Rates()
        world.faults.meta_down_until_s = 0.0
        while world.faults.late:
            if kernel.random() < 0.5:
                world.faults.land(0)
            else:
                world.faults.late.pop(0)
        if kernel.random() < 0.4:
            for host in list(world.hosts):
                world.bury(host)
        if kernel.random() < 0.5:
            for collector in list(world.collectors):
                world.bury(collector)
        world.faults.late.clear()
        kernel.resume_all()
        kernel.even()
        kernel.coarse_s = COARSE_S
        janitor = Collector(world, "janitor", threads=False)
        kernel.spawn(janitor.process, "main", lambda: self._tidy(janitor))
        kernel.run(steps=STEPS_MAX, each=lambda: None, until=lambda: self._is_done)
        if not self._is_done:
            kernel.fail(f"I5: not at the end after {STEPS_MAX} steps; left: {self._left()}")

    def _tidy(self, janitor: Collector) -> None:
        kernel, world = self._kernel, self._world
        kernel.sleep(PINS_END_S)
        for number in range(ROUNDS_MAX):
            self._try(janitor.sweeper.adopt)
            self._try(janitor.sweeper.lift_unnamed)
            self._try(janitor.remove_orphans)
            if number > 1:
                self._try(janitor.sweep_everything)
            if not self._left():
                break
            kernel.sleep(20.0)
        else:
            kernel.fail(f"I5: left after {ROUNDS_MAX} rounds: {self._left()}")
        for host in world.hosts:
            host.prove_well()
        while any(not host.is_proven for host in world.hosts):
            kernel.sleep(2.0)
        self._is_done = True

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except KVStoreError as error:
            self._kernel.note(f"janitor: {error}")

    def _left(self) -> list[str]:
        """What should not be there once everything has calmed down and all was condemned."""
        world = self._world
        live = {key.rpartition("/")[2] for key in world.store.keys_under(world.keys.sessions)}
        left = [*world.oracle.names, *world.store.keys_under(world.keys.condemned)]
        for folder in (places.TRASH, places.PLANS, places.QUARANTINE, places.PINS, places.STAGING):
            for entry in world.root.list(folder):
                name = Name(f"{folder}/{entry.name}")
                is_empty_owner = folder == places.PINS and not list(world.root.list(name))
                if entry.name not in live and not is_empty_owner:
                    left.append(name)
        return left
