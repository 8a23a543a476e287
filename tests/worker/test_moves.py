"""Move, and puts with a write mode, through real workers that have memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvstore.client.cache import Cache
from kvstore.client.limits import ClientLimits
from kvstore.client.remote_move import MOVES_MAX, RemoteMove, Slots
from kvstore.errors import InvalidRequest, Overloaded, StoreClosed, Unavailable
from kvstore.namespace import Namespace
from kvstore.results import PutResult
from kvstore.root.interface import Root
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.limits import method
from kvstore.wire.messages import sealed
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.worker import Worker
from kvstore.writes import WriteMode, WriteModeName
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import same
from tests.kit.tiers import IN_TIME_S, LARGE, QUICK, Acting, eventually, faulty, held, timed
from tests.kit.workers import (
    Served,
    chain_of,
    connected,
    images_of,
    opened,
    packed,
    put_messages,
    raw_channel,
    raw_stub,
    refused,
    sections_of,
    serving,
)

WAIT_S = PATIENCE_S
pytestmark = pytest.mark.slow


@contextmanager
def working(
    root: Root,
    *,
    write: WriteMode = WriteMode.UNCACHED,
    disk: Path | None = None,
    moves_max: int = 32,
    worker_limits: WorkerLimits | None = None,
) -> Iterator[tuple[Acting, Served]]:
    """A worker with memory, and the member behind it."""
    limits = replace(QUICK, write_deadline_s=10.0, moves_max=moves_max)
    with Acting(root, write=write, disk=disk, limits=limits) as acting:
        worker = Worker(acting.member, "127.0.0.1:0", worker_limits)
        worker.start()
        try:
            yield acting, Served(worker, acting.member)
        finally:
            worker.stop()


@contextmanager
def caching(
    served: Served, acting: Acting, bulk: str | None = None, *, write: WriteModeName | None = None
) -> Iterator[Cache]:
    """A client's cache of the same namespace as the acting member's."""
    with connected(served, bulk=bulk, write=write) as store:
        yield store.namespace("m", acting.cache.layout)


def test_a_prefix_is_prefetched_moved_and_released_through_a_worker(tmp_path: Path) -> None:
    root = faulty()
    with working(root, disk=tmp_path / "disk") as (acting, served), caching(served, acting) as cache:
        eventually(lambda: not acting.stat("disk_refilling"))
        acting.put(1, 12)
        tokens, size = acting.prompts.tokens(1, 14), acting.size
        with cache.prefetch(tokens) as ticket:
            assert ticket.wait(WAIT_S) == 12 * size
        assert ticket.done and ticket.error is None and all(acting.in_memory(1, 12))
        assert cache.release(tokens).wait(WAIT_S) == 12 * size
        assert cache.move(tokens, "disk").wait(WAIT_S) == 12 * size
        assert all(acting.on_disk(1, 12)) and not any(acting.in_memory(1, 12))
        assert cache.move(tokens, "root").wait(WAIT_S) == 12 * size
        assert not any(acting.on_disk(1, 12)) and all(acting.on_root(1, 12))
        count, array = cache.get(tokens)
        assert count == 12 * size and same(array, acting.prompts.kv(1, 12))
        acting.assert_settled()


def test_cancelling_ends_the_call_and_the_work_at_the_worker() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND, moves_max=1) as (acting, served), caching(served, acting) as cache:
        tokens = acting.prompts.tokens(1, 8)
        with held(root):
            acting.put(1, 8)
            ticket = cache.move(tokens, "root")
            assert not ticket.done and ticket.tokens == 0
            with pytest.raises(Overloaded, match="1 prefetches"):
                cache.prefetch(tokens)
            ticket.cancel()
            assert timed(lambda: ticket.wait(WAIT_S)) < IN_TIME_S
            assert ticket.done and ticket.error is None
            eventually(lambda: idle(served))
            assert cache.prefetch(tokens).wait(WAIT_S) == 8 * acting.size


def test_ctrl_c_while_a_move_begins_ends_it_and_gives_its_place_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come in ``Thread.start``, when the thread runs already and will give the place back too."""
    start, ended = threading.Thread.start, threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    def send(follow: object) -> None:
        assert ended.wait(WAIT_S)

    slots = Slots()
    move = RemoteMove(b"", slots)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            move.begin(send, WAIT_S)
    ended.set()
    move.wait(WAIT_S)
    assert move.done and move.error is None
    for number in range(MOVES_MAX):
        slots.take(number)
    with pytest.raises(Overloaded):
        slots.take(MOVES_MAX)


def test_a_client_that_goes_away_ends_what_it_asked_for() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served):
        with held(root):
            acting.put(1, 8)
            with caching(served, acting) as cache:
                ticket = cache.move(acting.prompts.tokens(1, 8), "root")
                assert not idle(served)
            ticket.wait(WAIT_S)
            assert ticket.done and isinstance(ticket.error, StoreClosed)
            eventually(lambda: idle(served))
            eventually(lambda: not served.worker.service.gate.inside_count)


def test_a_move_that_takes_long_is_not_taken_for_an_idle_client() -> None:
    root = faulty()
    limits = WorkerLimits(idle_s=0.5)
    with (
        working(root, write=WriteMode.BEHIND, worker_limits=limits) as (acting, served),
        caching(served, acting) as cache,
    ):
        with held(root):
            acting.put(1, 8)
            ticket = cache.move(acting.prompts.tokens(1, 8), "root")
            assert ticket.wait(2.0) == 0 and not ticket.done
        assert ticket.wait(WAIT_S) == 8 * acting.size and ticket.error is None


def test_a_worker_that_drains_does_not_wait_for_wishes() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served), caching(served, acting) as cache:
        with held(root):
            acting.put(1, 8)
            ticket = cache.move(acting.prompts.tokens(1, 8), "root")
            assert served.worker.drain(WAIT_S), "it ends before its time, while the root hangs"
            ticket.wait(WAIT_S)
            assert ticket.done and isinstance(ticket.error, Unavailable)


def test_a_worker_without_memory_says_what_to_do() -> None:
    with serving() as served, connected(served) as store:
        cache = store.namespace("m", LARGE)
        with pytest.raises(InvalidRequest, match="--memory"):
            cache.prefetch([1, 2, 3])
        with pytest.raises(InvalidRequest, match="expected memory or disk"):
            cache.prefetch([1, 2, 3], tier="root")  # type: ignore[arg-type]


def test_a_worker_that_is_not_there_raises_unavailable() -> None:
    with connected("127.0.0.1:1", limits=ClientLimits(pin_s=0.5)) as store:
        cache = Cache(store._port, Namespace.of("m", LARGE))
        with pytest.raises(Unavailable):
            cache.prefetch([1, 2, 3])


def test_a_foreign_client_sees_progress_and_is_told_what_is_wrong() -> None:
    with working(faulty()) as (acting, served), raw_stub(served) as stub:
        acting.put(1, 8)
        digest = opened(stub, acting.cache.layout)
        tokens = packed(acting.prompts.tokens(1, 8))
        request = pb.MoveRequest(namespace=digest, tokens=tokens, act=pb.ACT_PREFETCH)
        answers = [answer.chunks for answer in stub.Move(request, timeout=WAIT_S)]
        assert answers[0] == 0 and answers[-1] == 8 and answers == sorted(answers)
        for wrong, said in (
            (pb.MoveRequest(namespace=digest, tokens=tokens), "act is 0"),
            (pb.MoveRequest(namespace=digest, tokens=tokens, act=pb.ACT_MOVE, tier=cast(pb.Tier, 9)), "tier is 9"),
            (pb.MoveRequest(namespace=digest[:5], tokens=tokens, act=pb.ACT_MOVE), "32"),
        ):
            _, message, error = refused(lambda request=wrong: list(stub.Move(request, timeout=WAIT_S)))  # type: ignore[misc]
            assert said in message and error == "InvalidRequest"


def test_a_request_that_changed_on_the_way_moves_nothing() -> None:
    with working(faulty()) as (acting, served), raw_channel(served) as channel:
        tokens = packed(acting.prompts.tokens(1, 8))
        raw = bytearray(sealed(pb.MoveRequest(namespace=bytes(32), tokens=tokens, act=pb.ACT_PREFETCH)))
        raw[100] ^= 1
        call: Any = channel.unary_stream(method("Move"))
        code, _, error = refused(lambda: list(call(bytes(raw), timeout=WAIT_S)))
        assert (code.name, error) == ("DATA_LOSS", "BrokenTransfer")


# How puts are acknowledged


@for_each("bulk", ["shared", "tcp", "grpc"])
def test_w1_a_put_behind_is_acknowledged_while_the_root_hangs_and_read_from_memory(bulk: str) -> None:
    root = faulty()
    with working(root, write=WriteMode.UNCACHED) as (acting, served), caching(served, acting, bulk) as cache:
        tokens, kv = acting.prompts.tokens(1, 8), acting.prompts.kv(1, 8)
        with held(root):
            result = cache.put(tokens, kv, write="behind")
            assert result == PutResult(8 * acting.size, 8, 0, 8 * cache.layout.chunk_bytes)
            count, array = cache.get(tokens)
            assert count == 8 * acting.size and same(array, kv)
            assert all(acting.in_memory(1, 8)) and not any(acting.on_root(1, 8))
        acting.drain()
        assert all(acting.on_root(1, 8))
        acting.assert_settled()


@for_each("bulk", ["shared", "tcp", "grpc"])
@for_each("default", [None, "behind"])
@for_each("cached", [True, False])
def test_a_put_that_waits_for_the_root_does_so_whatever_the_worker_and_the_client_would_do(
    bulk: str, default: WriteModeName | None, cached: bool
) -> None:
    with (
        working(faulty(), write=WriteMode.BEHIND) as (acting, served),
        caching(served, acting, bulk, write=default) as cache,
    ):
        tokens, kv = acting.prompts.tokens(1, 8), acting.prompts.kv(1, 8)
        assert cache.put(tokens, kv, write="through", cache=cached).chunks_written == 8
        assert all(acting.on_root(1, 8))
        assert all(acting.in_memory(1, 8)) if cached else not any(acting.in_memory(1, 8))
        assert acting.stat("behind_bytes") == 0


@for_each("bulk", ["shared", "grpc"])
def test_a_client_that_says_behind_means_it_where_a_put_does_not_say(bulk: str) -> None:
    root = faulty()
    with working(root) as (acting, served), caching(served, acting, bulk, write="behind") as cache:
        with held(root):
            assert cache.put(acting.prompts.tokens(1, 8), acting.prompts.kv(1, 8)).tokens_present == 8 * acting.size
            assert cache.match(acting.prompts.tokens(1, 8)) == 8 * acting.size
            assert not any(acting.on_root(1, 8))
        served.worker.service.behind.wait_empty(WAIT_S)
        acting.drain()
        assert all(acting.on_root(1, 8))


@for_each("bulk", ["shared", "grpc"])
def test_a_turn_put_behind_continues_what_only_memory_has(bulk: str) -> None:
    root = faulty()
    with working(root) as (acting, served), caching(served, acting, bulk) as cache:
        tokens, size = acting.prompts.tokens(1, 9), acting.size
        with held(root):
            cache.put(tokens[: 4 * size], acting.prompts.kv(1, 4), write="behind")
            result = cache.put(tokens, acting.prompts.kv(1, 9, 4), prefix=4 * size, write="behind")
            assert (result.tokens_present, result.chunks_written) == (9 * size, 5)
            again = cache.put(tokens, acting.prompts.kv(1, 9), write="behind")
            assert (again.tokens_present, again.chunks_written, again.chunks_found) == (9 * size, 0, 9)
            gap = cache.put(acting.prompts.tokens(2, 4), acting.prompts.kv(2, 4, 2), prefix=2 * size, write="behind")
            assert gap.tokens_present == 0 and not any(acting.in_memory(2, 4))
        acting.drain()
        assert all(acting.on_root(1, 9)) and acting.get(1, 9) == 9


def test_a_foreign_client_that_sends_what_is_there_writes_only_the_rest() -> None:
    with working(faulty(), write=WriteMode.BEHIND) as (acting, served), raw_stub(served) as stub:
        acting.put(1, 3)
        digest = opened(stub, acting.cache.layout)
        start = pb.PutStart(namespace=digest, tokens=packed(acting.prompts.tokens(1, 5)), write=pb.WRITE_BEHIND)
        chain = chain_of(acting.cache.layout, acting.prompts.tokens(1, 5))
        images = images_of(chain, sections_of(acting.prompts.kv(1, 5), acting.cache.layout))
        answer = stub.Put(iter(put_messages(start, images)), timeout=WAIT_S)
        assert (answer.tokens_present, answer.chunks_written, answer.chunks_found) == (5 * acting.size, 2, 3)
        start.write = 7  # type: ignore[assignment]
        assert "write is 7" in refused(lambda: stub.Put(iter([pb.PutRequest(start=start)]), timeout=WAIT_S))[1]


def test_blocks_say_how_they_are_put_too() -> None:
    root = faulty()
    with working(root) as (acting, served), caching(served, acting) as cache:
        keys = [bytes([number]) * 32 for number in range(4)]
        blocks = [np.full(5000, number, np.uint8) for number in range(4)]
        with held(root):
            assert cache.blocks.put(keys, blocks, write="behind") == [True] * 4
            assert cache.blocks.match(keys) == 4
        acting.drain()
        out = [np.zeros(5000, np.uint8) for _ in keys]
        assert cache.blocks.get(keys, out) == [True] * 4
        assert all(map(np.array_equal, out, blocks))


def test_a_namespace_says_it_for_all_its_puts() -> None:
    root = faulty()
    with working(root) as (acting, served), connected(served) as store:
        cache = store.namespace("m", acting.cache.layout, write="behind")
        with held(root):
            cache.put(acting.prompts.tokens(1, 4), acting.prompts.kv(1, 4))
            assert cache.match(acting.prompts.tokens(1, 4)) == 4 * acting.size
            assert all(acting.in_memory(1, 4)) and not any(acting.on_root(1, 4))
        cache.put(acting.prompts.tokens(2, 4), acting.prompts.kv(2, 4), cache=False)
        assert all(acting.on_root(2, 4)) and not any(acting.in_memory(2, 4))
        with pytest.raises(InvalidRequest, match="write='later'"):
            cache.put(acting.prompts.tokens(3, 1), acting.prompts.kv(3, 1), write="later")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="write='later'"):
            store.namespace("m", acting.cache.layout, write="later")  # type: ignore[arg-type]


def idle(served: Served) -> bool:
    """True if no prefetch or move runs at the node."""
    return not len(served.member.node._moves)
