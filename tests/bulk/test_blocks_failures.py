"""A failure while engine-hashed blocks are in transit costs misses, never wrong bytes, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.cache import Cache
from kvstore.core.address import Address, block_address
from kvstore.engine.gc_state import ClusterGcState
from kvstore.format import places
from kvstore.format.keyset import BlockKeys
from kvstore.meta.keys import Keys, SweepId
from kvstore.meta.store import NO_LEASE, Event, KeyValue
from kvstore.meta.sweeps import NO_NONCE, Condemned, Seq
from kvstore.worker.limits import WorkerLimits
from tests.kit.arenas import all_let_go, memory_of, serving_memory
from tests.kit.damage import DAMAGES, spoil
from tests.kit.engine_blocks import blocks_of, buffers_for, counted, keys_of
from tests.kit.transports import MEDIUM, bulk_files_of
from tests.kit.workers import Served, connected, eventually, serving

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("way", ["shared", "tcp"])
COUNT = 100
SIZES = (100_000, 70_000)
KEYS, BLOCKS = keys_of(1, COUNT), blocks_of(1, COUNT, SIZES)


def file_of(served: Served, cache: Cache, root: Path, at: int) -> Path:
    address = block_address(cache.namespace, KEYS[at])
    return root / places.chunk(address, cache.namespace.id, served.member.node.identity.shard_bits)


def got(cache: Cache) -> list[bool]:
    """The blocks that are there, with their bytes right."""
    buffers = buffers_for(BLOCKS)
    hits = cache.blocks.get(KEYS, buffers)
    assert all(np.array_equal(buffers[at], BLOCKS[at]) for at in range(COUNT) if hits[at])
    return hits


def in_memory(served: Served, cache: Cache) -> list[bool]:
    memory = memory_of(served)
    with memory.refer(BlockKeys.of(cache.namespace, KEYS, [len(each) for each in BLOCKS]), 0, COUNT) as slots:
        return [entry is not None for entry in slots.entries]


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving(tmp_root) as found:
        yield found


@pytest.fixture
def hot(tmp_root: Path) -> Iterator[Served]:
    with serving_memory(tmp_root) as found:
        yield found
        all_let_go(found)


@BOTH
def test_a_damaged_file_is_a_miss_of_that_block_alone(served: Served, tmp_root: Path, way: str) -> None:
    """The worker finds it over gRPC and sets it aside, and the next put repairs it."""

    def run_case(damage: str) -> None:
        with connected(served, bulk=way) as store:
            cache = store.namespace("m", MEDIUM)
            cache.blocks.put(KEYS, BLOCKS)
            victim = file_of(served, cache, tmp_root, 70)
            spoil(victim, damage, file_of(served, cache, tmp_root, 72))
            before = store.stats()["miss_damaged"]
            assert got(cache) == [at != 70 for at in range(COUNT)], damage
            if damage != "removed":
                assert store.stats()["miss_damaged"] == before + 1
                assert not victim.exists()
            assert cache.blocks.put(KEYS, BLOCKS) == [True] * COUNT
            assert got(cache) == [True] * COUNT
        eventually(lambda: not [name for name in bulk_files_of(os.getpid()) if "/chunks/" in name], "no file is open")

    for damage in DAMAGES:
        run_case(damage)


@pytest.mark.parametrize("way", ["shared", "tcp", "grpc"])
def test_h1_what_a_sweep_condemned_counts_as_absent(hot: Served, way: str) -> None:
    """A block in memory or on the root: a client holds neither."""
    with connected(hot, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.blocks.put(KEYS, BLOCKS, write="through")
        assert all(in_memory(hot, cache))
        condemn(hot, [block_address(cache.namespace, KEYS[at]) for at in (3, 65)])
        assert got(cache) == [at not in (3, 65) for at in range(COUNT)]
        assert counted(store, "gets") == {way: 1}


def condemn(served: Served, victims: list[Address]) -> None:
    """Condemns the blocks, as a collector's sweeps of their shards do."""
    node = served.member.node
    keys, bits, revision = Keys(node.identity.root), node.identity.shard_bits, node.gc_view.revision + 1
    said = [(keys.gc_seq, Seq(bytes(15) + b"1", NO_NONCE).to_json())]
    for victim in victims:
        shard = (victim[0] << 8 | victim[1]) >> (16 - bits)
        value = Condemned.of_victims(SweepId(bytes(16)), bytes(16), [victim]).to_bytes()
        said.append((keys.condemned_in(shard), value))
    assert isinstance(node.gc_view, ClusterGcState)
    with node.gc_view.lock:
        node.gc_view.apply(
            [Event(key, KeyValue(key, value, revision, revision, NO_LEASE), revision) for key, value in said]
        )
    assert all(map(node.gc_view.condemns, victims))


def test_a_put_over_a_full_worker_is_refused_and_repeated_elsewhere(tmp_root: Path) -> None:
    """The first has no room for blocks that come as bytes; nothing of them is lost."""
    limits = WorkerLimits(bytes_in_flight_max=1)
    with serving(tmp_root, worker_limits=limits) as busy, serving(tmp_root) as other:
        with busy.worker.service.in_flight.reserved(1), connected(busy, other, bulk="tcp") as store:
            cache = store.namespace("m", MEDIUM)
            for at in range(0, COUNT, 10):
                assert all(cache.blocks.put(KEYS[at : at + 10], BLOCKS[at : at + 10]))
            assert all(got(cache))
            assert store.stats()["client_retries"] > 0
