"""A failure on a bulk connection is a miss or an error in bounded time, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.cache import Cache
from kvstore.client.pool import Connector
from kvstore.errors import Unavailable
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.transport.channel import GRANT_BYTES, SECRET_BYTES
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.damage import DAMAGES, spoil
from tests.kit.descriptors import open_before, open_now
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
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


def chunk_files(root: Path) -> list[Path]:
    return sorted((root / "chunks").glob("*/*"))


@BOTH
def test_a_damaged_file_is_a_miss_from_there_on(served: Served, tmp_root: Path, way: str) -> None:
    def run_case(damage: str) -> None:
        with connected(served, bulk=way) as store:
            cache = store.namespace("m", MEDIUM)
            cache.put(TOKENS, KV)
            assert cache.get(TOKENS)[0] == len(TOKENS)
            victim, other = chunk_files(tmp_root)[:2]
            spoil(victim, damage, other)
            before = store.stats()["miss_damaged"]
            # More than was ever stored: that the worker has less is no reason to look no further.
            count, array = cache.get(np.concatenate([TOKENS, TOKENS[: 3 * MEDIUM.chunk_tokens]]))
            assert count < len(TOKENS)
            assert same(array, KV[:, :, :count])
            if damage != "removed":
                assert store.stats()["miss_damaged"] > before, damage
                assert not victim.exists()
            assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)
            assert same(cache.get(TOKENS)[1], KV)
        eventually(lambda: not [name for name in bulk_files_of(os.getpid()) if "/chunks/" in name], "no chunk is open")

    for damage in DAMAGES:
        run_case(damage)


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
    offered = Connector._offer
    with worker_process(tmp_root) as worker, connected(worker.address, bulk=way, limits=hasty()) as store:
        cache = store.namespace("m", MEDIUM)

        def freezes(dialler: Connector, timeout_s: float) -> object:
            answer = offered(dialler, timeout_s)
            worker.send(signal.SIGSTOP)
            return answer

        monkeypatch.setattr(Connector, "_offer", freezes)
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
        monkeypatch.setattr(Connector, "_offer", lambda *_: silent.offered)
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


_CLIENT = """
import os, sys, time, signal
import numpy as np, kvstore
from kvstore.client import remote
from tests.kit.transports import MEDIUM, tokens_and_kv
store = kvstore.connect(sys.argv[1], bulk=sys.argv[2], write="behind")
cache = store.namespace("m", MEDIUM)
tokens, kv = tokens_and_kv(100)
cache.put(tokens, kv)
remote.ImageReceiver = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
print("reading", flush=True)
cache.get(tokens)
"""


@BOTH
def test_a_client_that_is_killed_while_it_reads_leaves_nothing_open(tmp_root: Path, way: str) -> None:
    with worker_process(tmp_root) as worker:
        pid = worker.pid
        for _ in range(2):
            killed = subprocess.run(
                [sys.executable, "-c", _CLIENT, worker.address, way],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                timeout=WAIT_S,
                check=False,
            )
            assert killed.returncode == -signal.SIGKILL
            assert killed.stdout == b"reading\n"
        eventually(lambda: not bulk_files_of(pid), "the worker has no chunk, arena or ledger open")
        with connected(worker.address, bulk=way) as store:
            in_use = ("holds", "bytes_in_flight", "calls_in_flight")
            eventually(lambda: not any(store.stats()[name] for name in in_use), "the worker gave up all for them")
            assert same(store.namespace("m", MEDIUM).get(TOKENS)[1], KV)


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


@BOTH
def test_a_hung_root_is_a_miss_in_time(way: str) -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    hang = Hang(after_bytes=5000)
    with serving(root) as served:
        with connected(served, bulk=way, limits=hasty()) as store:
            fill(served)
            cache = store.namespace("m", MEDIUM)
            out = np.zeros_like(KV)
            root.set_rules([Rule("read", hang, lambda name: name.startswith("chunks/"))])
            began_s = time.monotonic()
            good = cache.get(TOKENS, out=out)
            assert time.monotonic() - began_s < WAIT_S
            assert good < len(TOKENS)
            before = out.copy()
            root.set_rules([])
            hang.release.set()
            eventually(lambda: cache.get(TOKENS)[0] == len(TOKENS), "the root is read again")
            assert same(out, before)
