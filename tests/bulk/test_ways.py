"""The results are the same on every path of chunk bytes, for prompts and for engine-hashed blocks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.limits import ClientLimits
from kvstore.core.address import block_address
from kvstore.core.results import PutResult
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.engine.settings import Limits
from kvstore.format.header import Descent, decode_any
from kvstore.native import library as native
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.worker.server import Worker
from tests.kit.arenas import serving_memory
from tests.kit.engine_blocks import COUNT as BLOCKS_COUNT
from tests.kit.engine_blocks import blocks_of, buffers_for, counted, keys_of
from tests.kit.engine_blocks import same as same_blocks
from tests.kit.stores import member_on
from tests.kit.transports import MEDIUM, WAYS, same, tokens_and_kv
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

pytestmark = pytest.mark.slow
SIZE = MEDIUM.chunk_tokens
COUNT = 150
"""More chunks than files are handed over at once, and more bytes than one run has."""


KINDS = ("files", "no files", "memory", "memory and files")


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, module_root: Path) -> Iterator[Served]:
    folder = module_root / request.param
    folder.mkdir()
    root = MemoryRoot(MemoryFiles()) if request.param in ("no files", "memory") else folder
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
    tokens, kv = tokens_and_kv(COUNT, zlib.crc32(writer.encode()))
    with connected(served, bulk=writer) as store:
        result = store.namespace("m", MEDIUM).put(tokens, kv)
        assert result == PutResult(len(tokens), COUNT, 0, COUNT * MEDIUM.chunk_bytes)
        assert store.stats()[f"client_puts_{writer}"] == 1
    for reader in WAYS:
        with connected(served, bulk=reader) as store:
            cache = store.namespace("m", MEDIUM)
            count, array = cache.get(tokens)
            assert count == len(tokens)
            assert same(array, kv)
            with cache.hold(tokens) as hold:
                filled = np.zeros_like(kv)
                assert hold.read_into(filled) == len(tokens)
                assert same(filled, kv)
            assert store.stats()[f"client_gets_{reader}"] == 2


def test_every_way_reads_without_the_native_library(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", native.PurePython)
    monkeypatch.setattr(native, "brief", native.PurePython)
    with serving(tmp_root) as served:
        for writer in WAYS:
            check_every_way_reads(served, writer)


def test_only_what_is_missing_is_sent(served: Served) -> None:
    for way in WAYS:
        tokens, kv = tokens_and_kv(9, seed=9)
        with connected(served, bulk=way) as store:
            cache = store.namespace(f"missing-{way}", MEDIUM)
            cache.put(tokens[: 4 * SIZE], kv[:, :, : 4 * SIZE])
            before = served.worker.service.counters()["wire_bytes_in"]
            assert cache.put(tokens, kv) == PutResult(len(tokens), 5, 4, 5 * MEDIUM.chunk_bytes)
            assert served.worker.service.counters()["wire_bytes_in"] - before == 5 * MEDIUM.chunk_bytes
            assert cache.put(tokens, kv) == PutResult(len(tokens), 0, 9, 0)


def test_a_put_larger_than_the_shared_memory(served: Served) -> None:
    for arena_bytes in (1, 16 * MEDIUM.chunk_bytes, 13 << 20):
        check_large_puts(served, arena_bytes)


def check_large_puts(served: Served, arena_bytes: int) -> None:
    limits = ClientLimits(arena_bytes_max=arena_bytes)
    with connected(served, bulk="shared", limits=limits) as store:
        cache = store.namespace(f"arena-{arena_bytes}", MEDIUM)
        for seed in range(2):
            tokens, kv = tokens_and_kv(COUNT, 100 + seed + arena_bytes)
            assert cache.put(tokens, kv).chunks_written == len(tokens) // SIZE
            assert same(cache.get(tokens)[1], kv)


def test_more_calls_at_once_than_connections_go_over_grpc(served: Served) -> None:
    tokens, kv = tokens_and_kv(40, seed=11)
    with (
        connected(served, bulk="shared", limits=ClientLimits(bulk_links_max=1)) as store,
        ThreadPoolExecutor(4) as threads,
    ):
        cache = store.namespace("links", MEDIUM)
        cache.put(tokens, kv)
        assert all(same(array, kv) for _, array in threads.map(cache.get, [tokens] * 12))
        stats = store.stats()
        assert stats["client_gets_shared"] + stats["client_gets_grpc"] == 12
        assert stats["client_gets_shared"] > 0


@pytest.mark.parametrize("way", ["shared", "tcp", "auto"])
def test_a_way_that_is_not_there_leaves_bytes_to_grpc(tmp_root: Path, way: str) -> None:
    tokens, kv = tokens_and_kv(2)
    member = member_on(PosixRoot(tmp_root))
    worker = Worker(member, "127.0.0.1:0", bulk_port=None)
    worker.start()
    try:
        with connected(worker.address, bulk=way) as store:
            cache = store.namespace("m", MEDIUM)
            cache.put(tokens, kv)
            assert same(cache.get(tokens)[1], kv)
            assert store.stats()["client_gets_grpc"] == 1
    finally:
        worker.stop()
        member.close()


def test_another_host_is_not_taken_for_this_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.worker.service.bulk, "boot_id", "another")
    tokens, kv = tokens_and_kv(3, seed=12)
    with connected(served) as store:
        store.namespace("m", MEDIUM).put(tokens, kv)
        assert store.stats()["client_puts_tcp"] == 1
    with connected(served, bulk="shared") as store:
        assert same(store.namespace("m", MEDIUM).get(tokens)[1], kv)
        assert store.stats()["client_gets_grpc"] == 1


# Engine-hashed blocks


def test_blocks_written_by_one_way_are_read_by_every_way(served: Served) -> None:
    for writer in WAYS:
        check_blocks_by_every_way(served, writer)


def check_blocks_by_every_way(served: Served, writer: str) -> None:
    """Blocks of mixed sizes, more than one WANT asks for."""
    seed = zlib.crc32(writer.encode())
    keys, blocks = keys_of(seed), blocks_of(seed)
    with connected(served, bulk=writer) as store:
        assert store.namespace("m", MEDIUM).blocks.put(keys, blocks) == [True] * BLOCKS_COUNT
        assert counted(store, "puts") == {writer: 1}
    for reader in WAYS:
        with connected(served, bulk=reader) as store:
            cache = store.namespace("m", MEDIUM).blocks
            buffers = buffers_for(blocks)
            assert cache.get(keys, buffers) == [True] * BLOCKS_COUNT
            assert same_blocks(buffers, blocks)
            with cache.hold(keys) as hold:
                buffers = buffers_for(blocks)
                assert hold.get(keys[3:20], buffers[3:20]) == [True] * 17
                assert same_blocks(buffers[3:20], blocks[3:20])
            assert counted(store, "gets") == {reader: 2}
            assert store.stats()["client_bulk_broken"] == 0


def test_each_block_has_its_descent_in_its_file(served: Served, turn: int) -> None:
    for at, way in enumerate(WAYS):
        check_descents(served, way, (None, WriteMode.BEHIND, WriteMode.UNCACHED)[(at + turn) % 3])


def check_descents(served: Served, way: str, write: WriteMode | WriteModeName | None) -> None:
    keys, blocks = keys_of(zlib.crc32(f"descents {way} {write}".encode())), blocks_of(1)
    said = [
        Descent([at, at + 1], at, keys[at - 1] if at else b"").pack() if at % 3 else b"" for at in range(BLOCKS_COUNT)
    ]
    with connected(served, bulk=way, write=write) as store:
        cache = store.namespace("m", MEDIUM)
        assert cache.blocks.put(keys, blocks, descents=said) == [True] * BLOCKS_COUNT
        assert cache.blocks.get(keys, buffers_for(blocks)) == [True] * BLOCKS_COUNT
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
