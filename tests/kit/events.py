"""A subscriber in memory beside a truth: applies differences as a router does, and compares itself with the root."""

from __future__ import annotations

import time
from contextlib import closing

from kvstore.core.address import NO_PARENT, Address
from kvstore.events.index import PendingDeletions, RootIndex, Wanted
from kvstore.events.limits import EventLimits
from kvstore.format import places
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.store import MetadataStore
from tests.kit.clusters import Cluster

TICK_S = 10.0
CLOCK_REALTIME_COARSE = 5
"""The clock of files' times, of Linux' clock_gettime(2)."""


def await_tick() -> None:
    """Waits for the next tick of the clock by which folders change, which no clock of a test moves."""
    tick_ns = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == tick_ns:
        pass


class Ticking:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.passed_s = 1000.0

    def now_s(self) -> float:
        return self.passed_s

    def monotonic_s(self) -> float:
        return self.passed_s


class Following:
    """What one subscriber has, by addresses."""

    def __init__(self, cluster: Cluster, meta: MetadataStore | None = None, wanted: Wanted = lambda _: True) -> None:
        self.clock = Ticking()
        self.root = cluster.root
        limits, keys = EventLimits(), Keys(cluster.identity.root)
        doomed = PendingDeletions(meta or MemoryMetadata(cluster.store), keys, limits)
        self.truth = RootIndex(self.root, cluster.identity.shard_bits, doomed, wanted, limits, self.clock)
        self.heard: set[bytes] = set()
        cluster.undo.enter_context(closing(self.truth))

    def step(self) -> None:
        """One step, and everything that it tells."""
        self.truth.step()
        for _, difference in self.truth.settle():
            for removed in difference.removed:
                self.heard.remove(removed.address)
            for stored in difference.stored:
                assert stored.parent == NO_PARENT or stored.parent in self.heard
                assert stored.address not in self.heard
                self.heard.add(stored.address)

    def catch_up(self) -> None:
        """Steps until nothing is left to do, and some time later once more; what is done next is in another tick."""
        for _ in range(2):
            self.clock.passed_s += TICK_S
            self.step()
            while self.truth.is_busy:
                self.step()
        await_tick()

    def on_root(self) -> set[bytes]:
        """The addresses of all chunk files of the root."""
        found = set()
        for folder in self.root.list(places.CHUNKS):
            for entry in self.root.list(places.Name(f"{places.CHUNKS}/{folder.name}")):
                parsed = places.parse_chunk(entry.name)
                assert parsed is not None
                found.add(bytes(parsed[0]))
        return found


def addresses(*chains: tuple[Address, ...]) -> set[bytes]:
    """All addresses of some chains."""
    return {bytes(address) for chain in chains for address in chain}
