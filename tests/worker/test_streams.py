"""Slow, silent or vanished clients: none of them keeps a thread, memory or a hold of the worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore import Layout
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.limits import WorkerLimits
from tests.kit.cases import for_each
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import stretched
from tests.kit.stores import SMALL
from tests.kit.wire import IMAGES, TOKENS, opened, packed, put_messages, raw_channel, raw_stub, refused
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

pytestmark = pytest.mark.slow


def impatient(idle_s: float = 0.3, **more: int) -> WorkerLimits:
    """For clients that say nothing, beside some that do."""
    return stretched(WorkerLimits(idle_s=idle_s, stream_s_max=max(1.0, idle_s), **more), "idle_s", "stream_s_max")


LARGE = Layout(layers=4, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=256)  # 4 MiB


def nothing_in_use(served: Served) -> None:
    service = served.worker.service
    eventually(lambda: service.gate.inside_count == 0, "no call inside")
    assert service.in_flight.count == 0
    assert len(served.member.node.holds) == 0


def silent_after(messages: list[pb.PutRequest], ended: threading.Event) -> Iterator[pb.PutRequest]:
    """Sends some messages, and then nothing, without ending the stream."""
    yield from messages
    ended.wait(WAIT_S)


@for_each("sent", [0, 1, 2])
def test_a_put_that_stops_sending_is_cancelled(sent: int) -> None:
    ended = threading.Event()
    with serving(worker_limits=impatient()) as served, raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, SMALL), tokens=packed(TOKENS))
        messages = put_messages(start, IMAGES)
        code, _, _ = refused(lambda: stub.Put(silent_after(messages[:sent], ended), timeout=WAIT_S))
        ended.set()
        assert code is grpc.StatusCode.CANCELLED
        nothing_in_use(served)
        assert served.worker.service.counters()["calls_idle"] == 1


def test_a_put_that_drips_for_ever_is_cancelled() -> None:
    pause = threading.Event()

    def drip(digest: bytes) -> Iterator[pb.PutRequest]:
        yield pb.PutRequest(start=pb.PutStart(namespace=digest, tokens=packed(TOKENS)))
        while not pause.wait(0.05):
            yield pb.PutRequest()

    with serving(worker_limits=impatient()) as served, raw_stub(served) as stub:
        digest = opened(stub, SMALL)
        code, _, _ = refused(lambda: stub.Put(drip(digest), timeout=WAIT_S))
        pause.set()
        assert code is grpc.StatusCode.CANCELLED
        nothing_in_use(served)


def test_a_put_whose_client_is_gone_is_given_up() -> None:
    ended = threading.Event()
    with serving() as served, raw_stub(served) as stub:
        digest = opened(stub, SMALL)
        messages = put_messages(pb.PutStart(namespace=digest, tokens=packed(TOKENS)), IMAGES[:1])
        call = stub.Put.future(silent_after(messages, ended), timeout=WAIT_S)
        eventually(lambda: served.worker.service.counters()["wire_bytes_in"], "the first chunk came")
        call.cancel()
        ended.set()
        nothing_in_use(served)
        # The chunk that came whole may be there, nothing else is.
        assert stub.Match(pb.MatchRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S).chunks <= 1


def test_a_get_that_is_cancelled_stops_reading() -> None:
    tokens = np.arange(16 * LARGE.chunk_tokens)
    with serving() as served, raw_stub(served) as stub, connected(served) as store:
        store.namespace("m", LARGE).put(tokens, np.zeros(LARGE.shape(len(tokens)), np.float16))
        digest = opened(stub, LARGE)
        call = stub.Get(pb.GetRequest(namespace=digest, tokens=packed(tokens)), timeout=WAIT_S)
        next(call)
        next(call)
        call.cancel()
        nothing_in_use(served)
        assert served.worker.service.counters()["wire_bytes_out"] < 16 * LARGE.chunk_bytes


def test_a_get_that_nobody_reads_is_cancelled() -> None:
    tokens = np.arange(32 * LARGE.chunk_tokens)
    with (
        serving(worker_limits=stretched(WorkerLimits(idle_s=0.5), "idle_s")) as served,
        connected(served) as store,
        raw_stub(served) as stub,
    ):
        store.namespace("m", LARGE).put(tokens, np.zeros(LARGE.shape(len(tokens)), np.float16))
        digest = opened(stub, LARGE)
        call = stub.Get(pb.GetRequest(namespace=digest, tokens=packed(tokens)), timeout=WAIT_S)
        next(call)
        eventually(lambda: served.worker.service.watch.expired_count == 1, "the worker gave up")
        nothing_in_use(served)
        with pytest.raises(grpc.RpcError):
            list(call)


def test_work_of_our_own_is_not_the_clients_silence() -> None:
    """A root that takes longer than a client may be idle: the client waits for us, not we for it."""
    hang = Hang()
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    with serving(root, worker_limits=WorkerLimits(idle_s=0.3)) as served, raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, SMALL), tokens=packed(TOKENS))
        root.set_rules([Rule("stage", hang, times=1)])
        call = stub.Put.future(iter(put_messages(start, IMAGES)), timeout=WAIT_S)
        assert hang.reached.wait(WAIT_S)
        threading.Event().wait(1.5)  # several times what a client may be idle
        assert not call.done()
        hang.release.set()
        assert call.result().tokens_present == len(TOKENS)
        assert served.worker.service.watch.expired_count == 0


def test_calls_that_never_send_their_one_message_let_go_of_their_threads() -> None:
    ended = threading.Event()
    with (
        serving(worker_limits=impatient(0.5, calls_max=4)) as served,
        raw_channel(served) as channel,
        raw_stub(served) as stub,
    ):
        half_open: Any = channel.stream_unary("/kvstore.v1.KVStore/Match")
        calls = [half_open.future(silent_after([], ended)) for _ in range(40)]
        for call in calls:
            assert call.exception(timeout=WAIT_S) is not None, "refused, or cancelled for its silence"
        ended.set()

        def is_answered() -> bool:
            try:
                return stub.Stats(pb.StatsRequest(), timeout=WAIT_S).counters is not None
            except grpc.RpcError as error:  # a client learns that its call is over before the worker has let go
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        eventually(is_answered, "a free thread")
        assert len(opened(stub, SMALL)) == 32
