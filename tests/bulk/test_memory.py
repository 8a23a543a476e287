"""Clients that map a worker's memory: gets and views move no bytes, and leases cannot be lost."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.limits import ClientLimits
from kvstore.engine.settings import Limits
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.arenas import (
    MEMORY_BYTES,
    all_let_go,
    filled,
    leases_end,
    lose,
    mapped_bytes,
    memory_of,
    referenced_bytes,
    serving_memory,
    viewing_client,
)
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import NEVER_S, slowness
from tests.kit.transports import MEDIUM, bulk_files_of, same, tokens_and_kv
from tests.kit.workers import Served, connected, eventually, worker_process

pytestmark = pytest.mark.slow
SIZE = MEDIUM.chunk_tokens
COUNT = 150
TOKENS, KV = tokens_and_kv(COUNT)


@pytest.fixture(params=["files", "no files"])
def served(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Served]:
    with serving_memory(tmp_root if request.param == "files" else None) as found:
        yield found
        all_let_go(found)
        assert found.worker.service.counters()["calls_failed"] == 0


@pytest.fixture
def on_files(tmp_root: Path) -> Iterator[Served]:
    with serving_memory(tmp_root) as found:
        yield found


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_what_memory_has_is_read_without_the_root(served: Served, tmp_root: Path, way: str) -> None:
    filled(served, TOKENS, KV, MEDIUM)
    opened = served.member.node.counters.snapshot()["chunks_read"]
    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        out = np.zeros_like(KV)
        for _ in range(3):
            assert cache.get(TOKENS, out=out) == len(TOKENS)
            assert same(out, KV)
            out.fill(0)
        assert store.stats()[f"client_gets_{way}"] == 3
        eventually(lambda: store.stats()["memory_hits"] >= 3 * COUNT, "the worker hears what was read")
        assert store.stats()["client_bulk_broken"] == 0
    assert way == "shared" or served.member.node.counters.snapshot()["chunks_read"] == opened


def test_what_memory_lacks_comes_from_the_root_in_between(request: pytest.FixtureRequest, served: Served) -> None:
    """The two kinds of root have each gap by each way between them."""
    turn = int(request.node.callspec.params["served"] == "files")
    for at, gap in enumerate(((0, 150), (0, 3), (10, 70), (63, 65), (149, 150), (100, 150))):
        check_gap(served, ("shared", "tcp")[(at + turn) % 2], gap)


def check_gap(served: Served, way: str, gap: tuple[int, int]) -> None:
    lose(served, filled(served, TOKENS, KV, MEDIUM), *gap)
    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        assert same(cache.get(TOKENS)[1], KV)
        with cache.hold(TOKENS) as hold:
            assert same(np.concatenate(hold.view(), axis=2), KV)
        assert store.stats()["client_bulk_broken"] == 0
        assert store.stats()["client_gets_grpc"] == 0


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_what_memory_has_is_given_while_the_root_hangs_and_the_worker_is_not_taken_for_frozen(way: str) -> None:
    """The client waits as long for a frame as the worker may read."""
    root, both_s = FaultyRoot(MemoryRoot(MemoryFiles())), 2.0 * slowness()
    limits, hasty = Limits(read_deadline_s=both_s, stall_s=NEVER_S), ClientLimits(read_s=both_s)
    with serving_memory(root, limits=limits) as served, connected(served, bulk=way, limits=hasty) as store:
        filled(served, TOKENS[: 10 * SIZE], KV[:, :, : 10 * SIZE], MEDIUM)
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV, cache=False)
        assert same(cache.get(TOKENS)[1], KV)
        assert memory_of(served).stats()["memory_chunks"] == 10, "R2: the others were asked for once"
        root.set_rules([Rule("read", hang := Hang())])
        assert cache.get(TOKENS)[0] == 10 * SIZE
        hang.release.set()
        assert hang.reached.is_set() and store.stats()["client_set_aside"] == 0


def test_views_lie_in_the_workers_memory_and_cannot_be_written(served: Served) -> None:
    filled(served, TOKENS, KV, MEDIUM)
    with connected(served, bulk="shared") as store, store.namespace("m", MEDIUM).hold(TOKENS) as hold:
        views = hold.view()
        assert len(views) == COUNT
        for at, view in enumerate(views):
            assert same(view, KV[:, :, at * SIZE : (at + 1) * SIZE])
            assert view.dtype == KV.dtype
            with pytest.raises(ValueError, match="read-only"):
                view[0, 0, 0, 0, 0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        del view
        assert mapped_bytes(os.getpid())["Shared_Clean"] + mapped_bytes(os.getpid())["Shared_Dirty"] > 0
        assert len(served.worker.service.bulk_requests.leases or ()) == 1
        views.clear()
        leases_end(served)


def test_a_lease_lives_as_long_as_anything_cut_from_a_view(served: Served) -> None:
    filled(served, TOKENS, KV, MEDIUM)
    with connected(served, bulk="shared") as store:
        with store.namespace("m", MEDIUM).hold(TOKENS) as hold:
            views = hold.view()
        part = memoryview(views[7][1, 0][3:5].reshape(-1).view(np.uint8))
        wanted = bytes(part)
        views.clear()
        gc.collect()
        assert referenced_bytes(served) > 0
    # The store is closed and its connections with it: the views still exist.
    other, other_kv = tokens_and_kv(300, seed=5)
    for start in range(0, 300, 100):
        filled_part = other[: (start + 100) * SIZE]
        with connected(served, bulk="shared", write="behind") as store:
            store.namespace("m", MEDIUM).put(filled_part, other_kv[:, :, : len(filled_part)])
    assert bytes(part) == wanted
    assert referenced_bytes(served) > 0
    del part
    all_let_go(served)


def test_views_outlive_the_hold_the_store_and_the_worker(tmp_root: Path) -> None:
    """A2."""
    with worker_process(tmp_root, memory_bytes=MEMORY_BYTES) as worker:
        with connected(worker.address, write="behind") as store:
            cache = store.namespace("m", MEDIUM)
            cache.put(TOKENS, KV)
            eventually(lambda: cache.match(TOKENS) == len(TOKENS), "it is there")
        with connected(worker.address, bulk="shared") as store:
            hold = store.namespace("m", MEDIUM).hold(TOKENS)
            views = hold.view()
            worker.kill()
            assert same(np.concatenate(views, axis=2), KV)
    assert same(np.concatenate(views, axis=2), KV)
    assert mapped_bytes(os.getpid())
    del views
    gc.collect()
    eventually(lambda: not mapped_bytes(os.getpid()), "the mapping goes with the last array")


def test_a_client_that_is_killed_leaks_nothing(served: Served) -> None:
    """A2: while it has views, and in the middle of a request."""
    filled(served, TOKENS, KV, MEDIUM)
    before = bulk_files_of(os.getpid())
    with viewing_client(served.address, COUNT) as client:
        assert referenced_bytes(served) > 0
        os.kill(client.pid, signal.SIGSTOP)
        assert referenced_bytes(served) > 0
        client.kill()
        all_let_go(served)
    eventually(lambda: served.worker.service.bulk.connections_count == 0, "its connections end")  # type: ignore[union-attr]
    eventually(lambda: sorted(bulk_files_of(os.getpid())) == sorted(before), "its files are closed")


def test_a_client_that_lets_go_of_nothing_is_bounded(on_files: Served) -> None:
    """L1: beyond half of the memory chunks are read as if they were not in it, and everybody else is served."""
    views = []
    tokens, kv = TOKENS, KV
    with connected(on_files, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        for seed in range(6):
            tokens, kv = tokens_and_kv(80, seed=50 + seed)
            filled(on_files, tokens, kv, MEDIUM)
            with cache.hold(tokens) as hold:
                views.append((kv, hold.view()))
        stats = memory_of(on_files).stats()
        assert MEMORY_BYTES / 4 < stats["memory_leased_bytes"] <= MEMORY_BYTES / 2
        for kv, arrays in views:
            assert same(np.concatenate(arrays, axis=2), kv)
        with connected(on_files, bulk="shared") as other:
            assert same(other.namespace("m", MEDIUM).get(tokens)[1], kv)
        views.clear()
        del arrays
    all_let_go(on_files)


def test_more_views_than_descriptors_for_leases_are_copies(on_files: Served) -> None:
    limits = ClientLimits(leases_max=2)
    tokens, kv = TOKENS[: 4 * SIZE], KV[:, :, : 4 * SIZE]
    filled(on_files, tokens, kv, MEDIUM)
    with connected(on_files, bulk="shared", limits=limits) as store, store.namespace("m", MEDIUM).hold(tokens) as hold:
        views = [hold.view() for _ in range(5)]
        eventually(lambda: len(on_files.worker.service.bulk_requests.leases or ()) == 2, "two views have leases")
        assert all(same(view[3], kv[:, :, 3 * SIZE :]) for view in views)
        views.clear()
    all_let_go(on_files)


def test_what_only_memory_has_and_cannot_be_leased_is_sent(
    on_files: Served, tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(on_files, TOKENS, KV, MEDIUM)
    for file in (tmp_root / "chunks").glob("*/*"):
        file.unlink()
    monkeypatch.setattr(on_files.worker.service.bulk_requests.leases, "_leases_max", 0)
    with connected(on_files, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        assert same(cache.get(TOKENS)[1], KV)
        with cache.hold(TOKENS) as hold:
            assert all(same(view, KV[:, :, at * SIZE : (at + 1) * SIZE]) for at, view in enumerate(hold.view()))
        assert store.stats()["client_gets_grpc"] == 0


@pytest.mark.parametrize(("place", "reads"), [("header", "get"), ("payload", "view")])
def test_a_damaged_image_is_never_used(served: Served, place: str, reads: str) -> None:
    """I1: the client finds the damage, the worker learns of it over gRPC, and gives the root's chunk."""
    chain = filled(served, TOKENS, KV, MEDIUM)
    memory = memory_of(served)
    with memory.refer(chain, 80, 1) as slots:
        entry = slots.entries[0]
        assert entry is not None
        at = entry.offset + (60 if place == "header" else 4096 + 70_000)
        memory.arena.memory[at] ^= 1
    with connected(served, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        for _ in range(2):
            if reads == "get":
                assert same(cache.get(TOKENS)[1], KV)
            else:
                with cache.hold(TOKENS) as hold:
                    assert same(np.concatenate(hold.view(), axis=2), KV)
        assert store.stats()["client_bulk_damaged"] == 1
        assert store.stats()["memory_damaged"] == 1


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_r1_chunks_of_the_local_disk_alone_are_read(on_files: Served, tmp_root: Path, tmp_path: Path, way: str) -> None:
    """A chunk that a match counted is read, wherever it is; here the root has lost it."""
    chain, node = filled(on_files, TOKENS, KV, MEDIUM), on_files.member.node
    assert node.tiers is not None
    node.tiers.add_disk(str(tmp_path / "disk"), 64 << 20)
    node.refill(())
    disk, memory = node.tiers.disk, memory_of(on_files)
    assert disk is not None
    eventually(lambda: not disk.stats()["disk_refilling"], "its folder is taken in")
    with memory.refer(chain, 0, COUNT) as slots:
        for entry, image in zip(slots.referred, slots.images(0, COUNT), strict=True):
            assert disk.add(entry.place, image, entry.hints)
    lose(on_files, chain, 0, COUNT)
    for file in (tmp_root / "chunks").glob("*/*"):
        file.unlink()
    node.forget()
    with connected(on_files, bulk=way) as store:
        assert same(store.namespace("m", MEDIUM).get(TOKENS)[1], KV)
        assert store.stats()["client_gets_grpc"] == 0
