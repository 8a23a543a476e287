"""Engine-hashed blocks use the same paths as prompts, with the same results on each."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.limits import ClientLimits
from kvstore.core.address import block_address
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.engine.settings import Limits
from kvstore.format.header import Descent, decode_any
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.arenas import serving_memory
from tests.kit.engine_blocks import COUNT, blocks_of, buffers_for, counted, keys_of, same
from tests.kit.transports import MEDIUM, WAYS
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

pytestmark = pytest.mark.slow
KINDS = ("files", "no files", "memory", "memory and files")


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, module_root: Path) -> Iterator[Served]:
    root = MemoryRoot(MemoryFiles()) if request.param in ("no files", "memory") else module_root
    with serving_memory(root, 256 << 20) if "memory" in request.param else serving(root) as found:
        yield found
        eventually(lambda: found.worker.service.in_flight.count == 0, "all memory is given back")
        assert found.worker.service.counters()["calls_failed"] == 0
        assert not found.worker.service.bulk_requests.leases


@pytest.fixture
def turn(request: pytest.FixtureRequest) -> int:
    """The number of the worker's kind. Combinations of the other parameters are shared out among the kinds by it."""
    return KINDS.index(request.node.callspec.params["served"])


def test_what_one_way_wrote_every_way_reads(served: Served) -> None:
    for writer in WAYS:
        check_every_way_reads(served, writer)


def check_every_way_reads(served: Served, writer: str) -> None:
    """Blocks of mixed sizes, more than one WANT asks for."""
    seed = zlib.crc32(writer.encode())
    keys, blocks = keys_of(seed), blocks_of(seed)
    with connected(served, bulk=writer) as store:
        assert store.namespace("m", MEDIUM).blocks.put(keys, blocks) == [True] * COUNT
        assert counted(store, "puts") == {writer: 1}
    for reader in WAYS:
        with connected(served, bulk=reader) as store:
            cache = store.namespace("m", MEDIUM).blocks
            buffers = buffers_for(blocks)
            assert cache.get(keys, buffers) == [True] * COUNT
            assert same(buffers, blocks)
            with cache.hold(keys) as hold:
                buffers = buffers_for(blocks)
                assert hold.get(keys[3:20], buffers[3:20]) == [True] * 17
                assert same(buffers[3:20], blocks[3:20])
            assert counted(store, "gets") == {reader: 2}
            assert store.stats()["client_bulk_broken"] == 0


def test_each_block_has_its_descent_in_its_file(served: Served, turn: int) -> None:
    for at, way in enumerate(WAYS):
        check_descents(served, way, (None, WriteMode.BEHIND, WriteMode.UNCACHED)[(at + turn) % 3])


def check_descents(served: Served, way: str, write: WriteMode | WriteModeName | None) -> None:
    keys, blocks = keys_of(zlib.crc32(f"descents {way} {write}".encode())), blocks_of(1)
    said = [Descent([at, at + 1], at, keys[at - 1] if at else b"").pack() if at % 3 else b"" for at in range(COUNT)]
    with connected(served, bulk=way, write=write) as store:
        cache = store.namespace("m", MEDIUM)
        assert cache.blocks.put(keys, blocks, descents=said) == [True] * COUNT
        assert cache.blocks.get(keys, buffers_for(blocks)) == [True] * COUNT
    chunks = served.member.node.store
    names = [chunks.name(block_address(cache.namespace, key), cache.namespace.id) for key in keys]
    eventually(lambda: all(chunks.root.stat(name) is not None for name in names), "all are on the root")
    for name, each in zip(names, said, strict=True):
        seen = chunks.root.look(name, 4096)
        assert seen is not None and decode_any(seen.prefix).descent == each


def test_a_miss_in_the_middle_ends_nothing(served: Served) -> None:
    """Every third is not there, nor are the first and the last; their buffers are not touched."""
    for way in WAYS:
        keys, blocks = keys_of(7), blocks_of(7)
        missing = {0, COUNT - 1, *range(2, COUNT, 3)}
        with connected(served, bulk=way) as store:
            cache = store.namespace(f"gaps-{way}", MEDIUM).blocks
            there = [at for at in range(COUNT) if at not in missing]
            assert all(cache.put([keys[at] for at in there], [blocks[at] for at in there]))
            buffers = buffers_for(blocks)
            assert cache.get(keys, buffers) == [at not in missing for at in range(COUNT)]
            assert same([buffers[at] for at in there], [blocks[at] for at in there])
            assert not any(buffers[at].any() for at in missing)
            assert cache.get(keys_of(8, 3), buffers_for(blocks[:3])) == [False] * 3
            assert counted(store, "gets") == {way: 2}


def test_blocks_larger_than_a_run_and_puts_larger_than_the_shared_memory(served: Served, turn: int) -> None:
    for at, arena_bytes in enumerate((1, 17 << 20, 30 << 20)):
        sizes = ((9 << 20,), (1 << 20, 100, 12 << 20))[(at + turn) % 2]
        check_large_blocks(served, sizes, arena_bytes)


def check_large_blocks(served: Served, sizes: tuple[int, ...], arena_bytes: int) -> None:
    count = 4 if len(sizes) == 1 else 8
    keys, blocks = keys_of(11, count), blocks_of(11, count, sizes)
    limits = ClientLimits(arena_bytes_max=arena_bytes)
    with connected(served, bulk="shared", limits=limits) as store:
        cache = store.namespace(f"large-{sizes}-{arena_bytes}", MEDIUM).blocks
        assert cache.put(keys, blocks) == [True] * count
        buffers = buffers_for(blocks)
        assert cache.get(keys, buffers) == [True] * count
        assert same(buffers, blocks)
        assert store.stats()["client_bulk_broken"] == 0
        cache._port.clear(cache._namespace)


def test_as_many_blocks_as_a_call_may_have(tmp_root: Path) -> None:
    """The answer to a put has a byte for each. Most are given several times, since each new one is a file."""
    count = 65_536
    keys = [(at % 1_009).to_bytes(16, "little") for at in range(count)]
    memory = (np.arange(count, dtype=np.uint32) % 1_009).view(np.uint8).reshape(count, 4)
    with (
        serving_memory(tmp_root, 600 << 20, limits=Limits(read_deadline_s=WAIT_S, write_deadline_s=WAIT_S)) as served,
        connected(served, bulk="tcp", limits=ClientLimits(read_s=WAIT_S, write_s=WAIT_S)) as store,
    ):
        cache = store.namespace("m", MEDIUM).blocks
        stored = cache.put(keys, list(memory))
        got = np.zeros_like(memory)
        assert cache.get(keys, list(got)) == stored
        assert np.array_equal(got[stored], memory[stored])
        assert sum(stored) == count
        assert store.stats()["client_bulk_broken"] == 0
