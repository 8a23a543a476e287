"""A worker's life: listening, health, reflection, metrics, draining under load, and a root that hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import kvstore
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.meta.workers import WorkerRegistry
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.server import Worker
from tests.kit.etcd import running_etcd
from tests.kit.faulty_root import FaultyRoot
from tests.kit.patience import stretched
from tests.kit.stores import SMALL, kv_of, member_on, same
from tests.kit.tiers import held
from tests.kit.wire import IMAGES, KV, TOKENS, opened, packed, put_messages, raw_channel, raw_stub, refused
from tests.kit.workers import WAIT_S, Several, connected, eventually, serving, tokens_of, worker_process

pytestmark = pytest.mark.slow

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(channel: grpc.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S).status
    return status


# Listening


def test_worker_is_listed_from_its_start_to_its_drain() -> None:
    member = member_on(MemoryRoot(MemoryFiles()))
    workers = WorkerRegistry(member.meta, member.keys)
    worker = Worker(member, "127.0.0.1:0", advertise="kv-7.example:7070", version="1.2.3")
    assert workers.list() == {}
    worker.start()
    (record,) = workers.list().values()
    assert (record.address, record.version, record.host) == ("kv-7.example:7070", "1.2.3", socket.gethostname())
    assert worker.drain(WAIT_S)
    assert workers.list() == {}
    member.close()


# Health, reflection, metrics


def test_reflection_lists_the_services_and_describes_ours() -> None:
    def asked() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvstore.v1.KVStore")

    with serving() as served, raw_channel(served) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = stub.ServerReflectionInfo(asked(), timeout=WAIT_S)
        names = {service.name for service in listed.list_services_response.service}
        assert {"kvstore.v1.KVStore", "grpc.health.v1.Health"} <= names
        assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


# Draining


def test_a_put_in_progress_is_finished_and_new_calls_are_refused() -> None:
    with (
        serving() as served,
        raw_channel(served) as channel,
        raw_stub(served) as stub,
        ThreadPoolExecutor(2) as threads,
    ):
        digest = opened(stub, SMALL)
        go_on = threading.Event()

        def slowly() -> Iterator[pb.PutRequest]:
            start, *images = put_messages(pb.PutStart(namespace=digest, tokens=packed(TOKENS)), IMAGES)
            yield start
            go_on.wait(WAIT_S)
            yield from images

        put = threads.submit(lambda: stub.Put(slowly(), timeout=WAIT_S))
        eventually(lambda: served.worker.service.in_flight.count, "the put was accepted")
        drained = threads.submit(lambda: served.worker.drain(WAIT_S))
        eventually(lambda: served.worker.service.gate.draining, "the worker drains")
        assert health_of(channel) == NOT_SERVING
        code, message, kind = refused(lambda: stub.Match(pb.MatchRequest(namespace=digest), timeout=WAIT_S))
        assert (code, kind) == (grpc.StatusCode.UNAVAILABLE, "Draining")
        assert "use another worker" in message
        go_on.set()
        assert put.result().tokens_present == len(TOKENS)
        assert drained.result() is True


def test_a_put_that_does_not_end_is_cut_off_and_not_acknowledged() -> None:
    ended = threading.Event()
    with serving() as served, raw_stub(served) as stub, ThreadPoolExecutor(1) as threads:
        digest = opened(stub, SMALL)

        def never() -> Iterator[pb.PutRequest]:
            yield pb.PutRequest(start=pb.PutStart(namespace=digest, tokens=packed(TOKENS)))
            ended.wait(WAIT_S)

        put = threads.submit(lambda: refused(lambda: stub.Put(never(), timeout=WAIT_S)))
        eventually(lambda: served.worker.service.in_flight.count, "the put was accepted")
        assert served.worker.drain(0.2) is False
        ended.set()
        assert put.result()[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@pytest.mark.slow
def test_no_acknowledged_put_is_lost_by_draining(tmp_root: Path) -> None:
    """Clients put as fast as they can while the worker stops; acknowledged chunks exist afterwards."""
    acknowledged: list[int] = []
    started = threading.Semaphore(0)
    with worker_process(tmp_root) as process, kvstore.connect(process.address) as store:
        cache = store.namespace("m", SMALL)

        def work(number: int, turn: int) -> None:
            tokens = tokens_of(1000 * number + turn, len(TOKENS))
            try:
                cache.put(tokens, kv_of(SMALL, tokens), required=True)
            except KVStoreError:
                return
            acknowledged.append(1000 * number + turn)
            started.release()

        clients = Several(6, work)
        for _ in range(40):
            assert started.acquire(timeout=WAIT_S)
        assert process.drain() == "drained"
        clients.stop()
    with kvstore.open(str(tmp_root)) as store:
        cache = store.namespace("m", SMALL)
        for number in acknowledged:
            tokens = tokens_of(number, len(TOKENS))
            assert same(cache.get(tokens)[1], kv_of(SMALL, tokens))


# A root that hangs


def test_every_call_returns_in_time_while_the_root_hangs() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    limits = Limits(io_threads=2, width=2, stall_s=0.2, match_deadline_s=0.5, read_deadline_s=0.5, write_deadline_s=1.0)
    limits = stretched(limits, "stall_s", "match_deadline_s", "read_deadline_s", "write_deadline_s")
    with serving(root, limits=limits) as served, connected(served) as store, raw_channel(served) as channel:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        served.member.node.forget()
        with held(root, "stat", "open", "stage", "publish", "list"):
            assert cache.match(TOKENS) == 0
            assert cache.get(TOKENS)[0] == 0
            with cache.hold(TOKENS) as hold:
                assert hold.tokens == 0
            with pytest.raises(KVStoreError):
                cache.put(TOKENS + 1000, KV)
            assert cache.blocks.match([bytes(16)]) == 0
            assert cache.blocks.get([bytes(16)], [bytearray(5)]) == [False]
            eventually(lambda: health_of(channel) == NOT_SERVING, "health says that the root hangs")
        eventually(lambda: health_of(channel) == SERVING, "health says that the root is back")
        eventually(lambda: cache.match(TOKENS) == len(TOKENS), "the chunks are found again")
        assert same(cache.get(TOKENS)[1], KV)
        assert cache.put(TOKENS + 1000, kv_of(SMALL, TOKENS + 1000)).tokens_present == len(TOKENS)


def test_a_unix_socket_in_use_is_not_taken_over(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/s.sock"
    with serving(listen=listen) as served, raw_stub(served) as stub:
        with pytest.raises(InvalidRequest, match="could not listen"), serving(listen=listen):
            pass
        assert len(opened(stub, SMALL)) == 32
    with serving(listen=listen) as again, raw_stub(again) as stub:
        assert len(opened(stub, SMALL)) == 32, "a socket that a dead worker left is taken"


HANGS = """
import importlib, time
from kvstore.cli.main import main
from kvstore.worker.server import Worker
importlib.import_module("kvstore.cli.worker").ENDING_S = -9.0  # of the ten seconds for flushing
Worker.drain = lambda self, timeout_s: time.sleep(600)
main()
"""


def test_a_worker_whose_end_hangs_says_where_and_ends(tmp_path: Path, tmp_root: Path) -> None:
    """Nobody has to kill it, and its log names the step."""
    with running_etcd(tmp_path) as etcd:
        command = [
            sys.executable,
            "-c",
            HANGS,
            "worker",
            "--root",
            str(tmp_root),
            "--etcd",
            etcd.endpoints,
            "--listen",
            "127.0.0.1:0",
            "--drain",
            "1s",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and "ready" in child.stdout.readline()
            child.terminate()
            said = child.communicate(timeout=WAIT_S)[1]
    assert child.returncode == 1
    assert "Timeout" in said and "<lambda>" in said
