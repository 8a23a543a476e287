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
