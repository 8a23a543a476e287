"""The results are the same on every path of chunk bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.limits import ClientLimits
from kvstore.core.results import PutResult
from kvstore.native import library as native
from kvstore.root.posix import PosixRoot
from kvstore.worker.server import Worker
from tests.kit.stores import member_on
from tests.kit.transports import MEDIUM, WAYS, same, tokens_and_kv
from tests.kit.workers import Served, connected, serving

pytestmark = pytest.mark.slow
SIZE = MEDIUM.chunk_tokens
COUNT = 150
"""More chunks than files are handed over at once, and more bytes than one run has."""


@pytest.fixture(scope="module", params=["files", "memory"])
def served(request: pytest.FixtureRequest, module_root: Path) -> Iterator[Served]:
    with serving(module_root if request.param == "files" else None) as found:
        yield found


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
