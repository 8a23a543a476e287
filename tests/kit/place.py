"""A cluster with one node and cycles of a collector, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.core.clock import SystemClock
from kvstore.core.recency import stamp_ns
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.store import MetadataStore
from kvstore.root.interface import Root
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.membership import Collectors
from kvstore_gc.site import Timings
from kvstore_gc.threads import Stop
from tests.kit.clusters import TIMINGS, Cluster

LONG_S = 3600.0


@dataclass
class Place:
    """A cluster with one node, and collectors that run whole cycles on it."""

    cluster: Cluster
    stop: Stop = field(default_factory=Stop)

    def cycle(
        self,
        config: Config | None = None,
        *,
        root: Root | None = None,
        meta: MetadataStore | None = None,
        collectors: Collectors | None = None,
        timings: Timings = TIMINGS,
        pressure: Pressure | None = None,
    ) -> Cycle:
        config = config or Config()
        site = self.cluster.site(root, meta, timings=timings, pause=self.stop.pause)
        return Cycle(site, config, pressure or Pressure(site, config.max_bytes), collectors)

    def age(self, chain: ChunkKeys, age_s: float = LONG_S) -> None:
        """Sets the last use back by this long, after nodes have renewed it."""
        for member in self.cluster.members:
            member.node.refresher.drain()
        for depth, address in enumerate(chain.addresses):
            start_s = int(SystemClock().now_s() - age_s) // 60 * 60
            assert self.cluster.root.touch(self.cluster.name(address), stamp_ns(start_s, depth))

    def bytes_of(self, chain: ChunkKeys) -> int:
        stats = [self.cluster.root.stat(self.cluster.name(address)) for address in chain.addresses]
        return sum(stat.size_bytes for stat in stats if stat)

    def tree(self) -> dict[str, object]:
        """All files of the root, with sizes and times."""

        def walk(folder: places.Name) -> Iterator[tuple[str, object]]:
            for entry in self.cluster.root.list(folder):
                name = places.Name(f"{folder}/{entry.name}" if folder else entry.name)
                if entry.stat is None:
                    yield name, None
                    yield from walk(name)
                else:
                    yield name, entry.stat

        return dict(walk(places.Name("")))
