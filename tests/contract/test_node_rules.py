"""Rules of gc/PROTOCOL.md that a node keeps, seen from outside: what it matches, and what a collector spares for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.address import Address, block_addresses
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.keys import SweepId, part_of
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.session import SessionRecord
from kvstore.meta.store import Event, LeaseId, Watch, WatchLost
from kvstore.meta.sweeps import Condemned
from kvstore_gc.ledger import SweepStore
from tests.kit.clusters import SPACE, Cluster, cluster, eventually, looking, prompt, put
from tests.kit.followers import SilentWatch
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import TINY

BLOCKS = 24
"""Enough to have some in every shard of the cluster."""


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@dataclass
class Swept:
    """The addresses that a sweep is to delete."""

    addresses: Sequence[Address]


def sweep_of(c: Cluster, swept: Swept | ChunkKeys) -> threading.Thread:
    """Starts a sweep in a thread."""
    plans = c.plans(cast(ChunkKeys, swept))
    thread = threading.Thread(target=lambda: c.collector().sweep(plans))
    thread.start()
    return thread


def test_h1_condemned_blocks_of_every_shard_are_misses(c: Cluster) -> None:
    node, other = c.node(), c.node()
    blocks = Store(LocalTransport(node)).namespace(SPACE.name, TINY).blocks
    keys = [bytes([number]) * 16 for number in range(BLOCKS)]
    assert all(blocks.put(keys, [np.full(99, number, np.uint8) for number in range(BLOCKS)]))
    hold = looking(other, prompt(1, 1))
    swept = Swept(block_addresses(SPACE, keys))
    sweep = sweep_of(c, swept)
    eventually(lambda: node.presence.current().announced > 0)
    assert not any(blocks.present(keys)), "it has announced the sweep, so it knows every condemned block (A1)"
    assert blocks.match(keys) == 0 and c.present(cast(ChunkKeys, swept)) == BLOCKS
    other.node.holds.release(hold)
    sweep.join(PATIENCE_S)


def test_p2_a_pin_keeps_the_names_of_held_chunks(c: Cluster) -> None:
    node, other, held, pinned = c.node(), c.node(), prompt(1, 8), prompt(2, 8)
    put(node, held)
    put(node, pinned)
    hold, waiting = node.node.hold(held), looking(other, prompt(3, 1))
    sweep = sweep_of(c, held)
    key = node.presence.current().key

    def named() -> bytes:
        found = c.store.get(key)
        return SessionRecord.from_json(found.value).held if found is not None else b""

    eventually(lambda: bool(named()))
    node.pin(pinned, 60.0, "owner")
    other.node.holds.release(waiting)
    sweep.join(PATIENCE_S)
    assert c.present(held) == 8
    node.node.holds.release(hold)


class Joining(MemoryMetadata):
    """A store in which a sweep begins right after the lease of the next session was granted."""

    begin: Callable[[], object] = staticmethod(lambda: None)

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        lease = super().grant(ttl_s, timeout_s)
        begin, self.begin = self.begin, lambda: None
        begin()
        return lease

    def watch(self, prefix: str, from_revision: int) -> Watch:  # type: ignore[override]
        return SilentWatch()


class Losing(MemoryMetadata):
    """A store whose first watch delivers nothing, and is lost once ``is_lost`` is set."""

    is_lost = False
    watches = 0

    def watch(self, prefix: str, from_revision: int) -> Watch:  # type: ignore[override]
        self.watches += 1
        return super().watch(prefix, from_revision) if self.watches > 1 else Lost(self)


class Lost(SilentWatch):
    """That watch."""

    def __init__(self, meta: Losing) -> None:
        self._meta = meta

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        if self._meta.is_lost:
            raise WatchLost("cut off")
        return super().next(timeout_s)


def condemn(c: Cluster, chain: ChunkKeys) -> None:
    """Begins a sweep of the first chunk of a chain, which no collector continues."""
    first = chain.addresses[0]
    sweep = Condemned.of_victims(SweepId(b"s" * 16), b"c" * 16, [first])
    assert SweepStore(c.site()).condemn({part_of(first): sweep})


def test_v3_sweeps_of_a_lost_watch_are_read_afresh(c: Cluster) -> None:
    meta, chain = Losing(c.store), prompt(1, 8)
    node = c.node(meta=meta)
    assert put(node, chain) == 8
    condemn(c, chain)
    meta.is_lost = True
    eventually(lambda: node.node.match(chain) == 0)
    assert node.node.counters.snapshot()["sessions_lost"] == 0


def test_v1_a_sweep_that_begins_before_the_session_is_seen(c: Cluster) -> None:
    chain = prompt(1, 8)
    put(c.node(), chain)
    meta = Joining(c.store)
    meta.begin = lambda: condemn(c, chain)
    assert c.node(meta=meta).node.match(chain) == 0
