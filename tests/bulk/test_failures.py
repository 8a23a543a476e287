"""A failure on a bulk connection is a miss or an error in bounded time, and leaves nothing behind; with blocks, too."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.cache import Cache
from kvstore.client.pool import Links
from kvstore.core.address import block_address
from kvstore.errors import Unavailable
from kvstore.format import places
from kvstore.transport.channel import GRANT_BYTES, SECRET_BYTES
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.limits import WorkerLimits
from tests.kit.damage import DAMAGES, spoil
from tests.kit.descriptors import open_before, open_now
from tests.kit.engine_blocks import blocks_of, buffers_for, keys_of
from tests.kit.secured import secured
from tests.kit.transports import MEDIUM, bulk_files_of, hasty, same, tokens_and_kv
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving, worker_process

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("way", ["shared", "tcp"])
TOKENS, KV = tokens_and_kv(100)


def fill(worker: Served | str) -> None:
    """Puts the prompt through another client, which has time for it."""
    with connected(worker) as patient:
        patient.namespace("m", MEDIUM).put(TOKENS, KV)


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving(tmp_root) as found:
        yield found


@BOTH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_freezes_costs_misses_and_little_time(
    tmp_root: Path, way: str, number: signal.Signals
) -> None:
    with worker_process(tmp_root) as worker, connected(worker.address, bulk=way, limits=hasty()) as store:
        fill(worker.address)
        cache = store.namespace("m", MEDIUM)
        out = np.zeros_like(KV)
        stopped = threading.Timer(0.2, worker.send, (number,))
        stopped.start()
        good, began_s, took_s = len(TOKENS), time.monotonic(), 0.0
        while good == len(TOKENS) and time.monotonic() < began_s + WAIT_S:
            call_s = time.monotonic()
            good = cache.get(TOKENS, out=out)
            took_s = time.monotonic() - call_s
        assert good < len(TOKENS)
        assert took_s < WAIT_S
        assert same(out[:, :, :good], KV[:, :, :good])
        before = out.copy()
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            cache.put(*tokens_and_kv(100, seed=1))
        assert time.monotonic() - began_s < WAIT_S
        stopped.join()
        if number is signal.SIGSTOP:
            worker.send(signal.SIGCONT)
            eventually(lambda: cache.get(TOKENS)[0] == len(TOKENS), "the client comes back to the worker")
        assert same(out, before), "a read that was given up wrote into the caller's memory"


@BOTH
def test_a_worker_that_freezes_before_it_greets_is_a_miss(
    tmp_root: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker offered the requested path, so its silence there is not a mistake of the caller."""
    offered = Links._offer
    with worker_process(tmp_root) as worker, connected(worker.address, bulk=way, limits=hasty()) as store:
        cache = store.namespace("m", MEDIUM)

        def freezes(dialler: Links, timeout_s: float) -> object:
            answer = offered(dialler, timeout_s)
            worker.send(signal.SIGSTOP)
            return answer

        monkeypatch.setattr(Links, "_offer", freezes)
        assert cache.get(TOKENS)[0] == 0
        with pytest.raises(Unavailable):
            cache.put(TOKENS, KV)
        monkeypatch.undo()
        worker.send(signal.SIGCONT)
        eventually(lambda: _stored(cache), "the client comes back to the worker")
        eventually(lambda: same(cache.get(TOKENS)[1], KV), "a miss where a second was too short")


class Silent:
    """A port that takes every connection and says nothing, and the offer of the worker behind it."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.offered = pb.OpenBulkResponse(
            tcp_port=self._socket.getsockname()[1], grant=bytes(GRANT_BYTES), secret=bytes(SECRET_BYTES)
        )

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_a_port_that_is_silent_within_tls_leaves_calls_to_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with secured(tmp_path, {"cert:engine": {"acme": "write"}}) as served, Silent() as silent:
        tls = served.authority.client("engine")
        monkeypatch.setattr(Links, "_offer", lambda *_: silent.offered)
        with kvstore.connect(served.address, tls=tls, bulk="tcp", limits=hasty()) as store:
            cache = store.namespace("m", MEDIUM, tenant="acme")
            assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)
            assert cache.get(TOKENS)[0] == len(TOKENS)


def _stored(cache: Cache) -> bool:
    with suppress(Unavailable):
        return cache.put(TOKENS, KV).tokens_present == len(TOKENS)
    return False


def test_without_its_socket_file_a_worker_is_reached_another_way(served: Served) -> None:
    assert served.worker.service.bulk is not None
    os.unlink(served.worker.service.bulk.unix_path)
    with connected(served) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        assert same(cache.get(TOKENS)[1], KV)
        assert store.stats()["client_gets_tcp"] == 1


@BOTH
def test_nothing_leaks_over_many_calls_and_clients(served: Served, way: str) -> None:
    def calls(seed: int) -> None:
        with connected(served, bulk=way, write="behind" if seed % 2 else None) as store:
            cache = store.namespace("m", MEDIUM)
            tokens, kv = tokens_and_kv(70, seed)
            cache.put(tokens, kv)
            for _ in range(3):
                assert same(cache.get(tokens)[1], kv)

    earlier = len(bulk_files_of(os.getpid()))  # of servers that other tests share
    calls(0)
    eventually(lambda: len(bulk_files_of(os.getpid())) <= earlier, "all is closed")
    before = open_before()
    for seed in range(1, 6):
        calls(seed)
    eventually(lambda: len(bulk_files_of(os.getpid())) <= earlier, "all is closed")
    eventually(lambda: open_now() <= before + 4, "as few files as before")
    assert served.worker.service.bulk is not None
    eventually(lambda: served.worker.service.bulk.connections_count == 0, "no connection is left")  # type: ignore[union-attr]


BLOCKS_COUNT = 100
SIZES = (100_000, 70_000)
KEYS, BLOCKS = keys_of(1, BLOCKS_COUNT), blocks_of(1, BLOCKS_COUNT, SIZES)


def file_of(served: Served, cache: Cache, root: Path, at: int) -> Path:
    address = block_address(cache.namespace, KEYS[at])
    return root / places.chunk(address, cache.namespace.id, served.member.node.identity.shard_bits)


def got_blocks(cache: Cache) -> list[bool]:
    """The blocks that are there, with their bytes right."""
    buffers = buffers_for(BLOCKS)
    hits = cache.blocks.get(KEYS, buffers)
    assert all(np.array_equal(buffers[at], BLOCKS[at]) for at in range(BLOCKS_COUNT) if hits[at])
    return hits


@BOTH
def test_damaged_file_of_a_block_is_a_miss_of_that_block(served: Served, tmp_root: Path, way: str) -> None:
    """The worker finds it over gRPC and sets it aside, and the next put repairs it."""

    def run_case(damage: str) -> None:
        with connected(served, bulk=way) as store:
            cache = store.namespace("m", MEDIUM)
            cache.blocks.put(KEYS, BLOCKS)
            victim = file_of(served, cache, tmp_root, 70)
            spoil(victim, damage, file_of(served, cache, tmp_root, 72))
            before = store.stats()["miss_damaged"]
            assert got_blocks(cache) == [at != 70 for at in range(BLOCKS_COUNT)], damage
            if damage != "removed":
                assert store.stats()["miss_damaged"] == before + 1
                assert not victim.exists()
            assert cache.blocks.put(KEYS, BLOCKS) == [True] * BLOCKS_COUNT
            assert got_blocks(cache) == [True] * BLOCKS_COUNT
        eventually(lambda: not [name for name in bulk_files_of(os.getpid()) if "/chunks/" in name], "no file is open")

    for damage in DAMAGES:
        run_case(damage)


def test_a_put_over_a_full_worker_is_refused_and_repeated_elsewhere(tmp_root: Path) -> None:
    """The first has no room for blocks that come as bytes; nothing of them is lost."""
    limits = WorkerLimits(bytes_in_flight_max=1)
    with serving(tmp_root, worker_limits=limits) as busy, serving(tmp_root) as other:
        with busy.worker.service.in_flight.reserved(1), connected(busy, other, bulk="tcp") as store:
            cache = store.namespace("m", MEDIUM)
            for at in range(0, BLOCKS_COUNT, 10):
                assert all(cache.blocks.put(KEYS[at : at + 10], BLOCKS[at : at + 10]))
            assert all(got_blocks(cache))
            assert store.stats()["client_retries"] > 0
