"""Nodes that tell each other what they hold, over metadata in memory, stepped without threads."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

from kvstore.core.address import Address
from kvstore.core.clock import Clock, RandomIds
from kvstore.core.metrics import Counters
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session
from kvstore.meta.store import MetadataStore
from kvstore.meta.workers import Digests, WorkerRecord
from kvstore.peers.limits import PeerLimits
from kvstore.peers.reports import DigestPublisher
from kvstore.peers.selection import PeerSelector
from kvstore.peers.tier import PeerFollower
from tests.kit.fake_meta import FakeClock

KEYS = Keys(bytes(16))


def addresses_of(count: int, seed: int = 0) -> list[Address]:
    """Random addresses, as hashes are."""
    raw = np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)
    return [Address(each.tobytes()) for each in raw]


def print_of(address: Address) -> int:
    return int.from_bytes(address[4:8], "little")


def shard_of(address: Address) -> int:
    return address[0] >> 2


def sorted_prints(addresses: list[Address]) -> npt.NDArray[np.uint32]:
    return np.array(sorted(map(print_of, addresses)), np.uint32)


class Held:
    """The content of a node's memory: a source of digests."""

    def __init__(self) -> None:
        self._shards: dict[int, set[Address]] = {shard: set() for shard in range(64)}
        self._changed: set[int] = set()

    def add(self, *addresses: Address) -> None:
        for address in addresses:
            self._shards[shard_of(address)].add(address)
            self._changed.add(shard_of(address))

    def drop(self, *addresses: Address) -> None:
        for address in addresses:
            self._shards[shard_of(address)].discard(address)
            self._changed.add(shard_of(address))

    def changes(self) -> set[int]:
        found, self._changed = self._changed, set()
        return found

    def prints(self, shard: int) -> npt.NDArray[np.uint32]:
        return sorted_prints(list(self._shards[shard]))


class Node:
    """One node: its memory, its session, and both ends of its digests."""

    def __init__(self, address: str, meta: MetadataStore, clock: Clock, limits: PeerLimits | None = None) -> None:
        self.meta = meta
        self.clock = clock
        self.held = Held()
        self.counters = Counters()
        self.limits = limits or PeerLimits()
        self.digests = Digests(meta, KEYS)
        roster = PeerSelector(self.limits, clock, Random())
        self.follower = PeerFollower(self.digests, address, self.limits, self.counters, clock, roster)
        self.publisher = DigestPublisher(
            self.digests,
            self.held,
            WorkerRecord(address),
            self.limits,
            self.counters,
            clock,
            lambda: len(self.follower.directory.numbers),
        )
        self.session = self.join()

    def join(self) -> Session:
        """A new session, as presence would open one."""
        self.session = Session.open(self.meta, KEYS, clock=self.clock, ids=RandomIds(), ttl_s=10)
        self.publisher.begin(self.session)
        self.follower.begin(self.session)
        return self.session

    def leave(self) -> None:
        """Ends a session as if it had died."""
        self.publisher.end(self.session)
        self.follower.end(self.session)

    def leading(self, chunks: list[Address], first: int = 0) -> int:
        return self.follower.directory.leading(chunks, first)

    def counted(self, name: str) -> int:
        return self.counters.snapshot().get(name, 0)


class Cluster:
    """Nodes over one store of metadata, with one clock."""

    def __init__(self, count: int, limits: PeerLimits | None = None) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.nodes = [
            Node(f"10.0.0.{n}:7070", MemoryMetadata(self.store, self.clock), self.clock, limits) for n in range(count)
        ]
        self.sync()

    def sync(self) -> None:
        """Everybody tells, and then everybody listens."""
        for node in self.nodes:
            node.publisher.step()
        for node in self.nodes:
            node.follower.step(0.0)
            node.follower.step(0.0)
