"""Operations of a real worker: begun, listed, followed and cancelled by its clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.census.selection import Selection
from kvstore.core.operations import OperationRun
from kvstore.errors import InvalidRequest
from kvstore.v1 import control_pb2 as pb
from tests.kit.administration import SIZE, raw_control
from tests.kit.memory_workers import caching, running, waiters, working
from tests.kit.stores import SMALL, same
from tests.kit.tiers import LARGE, eventually, faulty
from tests.kit.wire import KV, TOKENS, packed, refused
from tests.kit.workers import WAIT_S, Served, connected, serving

pytestmark = pytest.mark.slow


def endless(run: OperationRun) -> str:
    while True:
        run.pause(WAIT_S)


def begun(served: Served) -> str:
    """The id of an operation of the worker that runs until it is cancelled."""
    return served.member.node.operations.begin("prefetch", endless, tenant="").status.id


def test_selection_is_counted_then_cleared_except_pinned_chunks() -> None:
    with serving() as served, connected(served) as store:
        acme, beta = (store.namespace("m", SMALL, tenant=tenant) for tenant in ("acme", "beta"))
        acme.put(TOKENS, KV)
        beta.put(TOKENS, KV)
        acme.pin(TOKENS[: 2 * SIZE])
        counted = store.clear(Selection(tenant="acme"), dry_run=True)
        assert counted.wait(WAIT_S)
        assert counted.state == "done" and (counted.counts["chunks"], counted.counts["pinned"]) == (2, 2)
        assert acme.match(TOKENS) == len(TOKENS)
        cleared = store.clear(Selection(tenant="acme"), worker=served.address)
        assert cleared.wait(WAIT_S)
        assert (cleared.state, cleared.done, cleared.last.identity) == ("done", cleared.total, "anyone")
        assert (cleared.counts["chunks"], cleared.counts["pinned"]) == (2, 2)
        assert (acme.match(TOKENS), beta.match(TOKENS)) == (2 * SIZE, len(TOKENS))
        everything = store.clear(Selection(namespace=acme.namespace.digest), pinned=True)
        assert everything.wait(WAIT_S)
        assert everything.counts["chunks"] == 2 and acme.match(TOKENS) == 0 and beta.match(TOKENS) == len(TOKENS)
        assert [each.id for each in store.operations()] == [everything.id, cleared.id, counted.id]


def test_invalid_selection_is_refused_and_begins_nothing() -> None:
    with serving() as served, raw_control(served) as stub, connected(served) as store:
        for request in (pb.ClearSelectedRequest(), pb.ClearSelectedRequest(selection=pb.Selection(namespace=b"short"))):
            code, _, _ = refused(lambda asked=request: stub.ClearSelected(asked, timeout=WAIT_S))  # type: ignore[misc]
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(InvalidRequest, match="no namespace of this root is meant by tenant 'nobody'"):
            store.clear(Selection(tenant="nobody"))
        assert store.operations() == []


def test_prefetch_through_a_worker_brings_chunks_to_its_tiers(tmp_path: object) -> None:
    with working(faulty(), disk=tmp_path / "disk") as (acting, served), caching(served, acting) as cache:  # type: ignore[operator]
        eventually(lambda: not acting.stat("disk_refilling"))
        acting.put(1, 12)
        tokens, size = acting.prompts.tokens(1, 14), acting.size
        operation = cache.prefetch(tokens)
        assert operation.wait(WAIT_S)
        assert (operation.state, operation.done, operation.total) == ("done", 12 * size, 12 * size)
        assert all(acting.in_memory(1, 12))
        cache.evict_first(tokens)
        operation = cache.prefetch(tokens, tier="disk", worker=served.address)
        assert operation.wait(WAIT_S) and operation.done == 12 * size
        assert all(acting.on_disk(1, 12))
        count, array = cache.get(tokens)
        assert count == 12 * size and same(array, acting.prompts.kv(1, 12))
        acting.assert_settled()


def test_foreign_client_prefetches_and_waits_with_the_proto_alone() -> None:
    with working(faulty()) as (acting, served), raw_control(served) as stub, caching(served, acting) as cache:
        acting.put(1, 8)
        digest, tokens = cache.namespace.digest, packed(acting.prompts.tokens(1, 8))
        answer = stub.Prefetch(pb.PrefetchRequest(namespace=digest, tokens=tokens), timeout=WAIT_S).operation
        answer = stub.GetOperation(pb.GetOperationRequest(id=answer.id, wait_s=10), timeout=WAIT_S).operation
        assert (answer.state, answer.done, answer.unit) == ("done", 8 * acting.size, "tokens")
        for wrong, message in (
            (pb.PrefetchRequest(namespace=digest, tokens=tokens, tier="root"), "expected memory or disk"),
            (pb.PrefetchRequest(namespace=digest, tokens=tokens, tier="disk"), "--disk"),
            (pb.PrefetchRequest(namespace=digest, tokens=b"odd"), "tokens"),
        ):
            code, said, _ = refused(lambda wrong=wrong: stub.Prefetch(wrong, timeout=WAIT_S))  # type: ignore[misc]
            assert code is grpc.StatusCode.INVALID_ARGUMENT and message in said
        request = pb.GetOperationRequest(id=answer.id, wait_s=-1)
        code, _, _ = refused(lambda: stub.GetOperation(request, timeout=WAIT_S))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_worker_without_memory_says_what_to_do() -> None:
    with serving() as served, connected(served) as store:
        cache = store.namespace("m", LARGE)
        with pytest.raises(InvalidRequest, match="--memory"):
            cache.prefetch([1, 2, 3])
        with pytest.raises(InvalidRequest, match="is not one of"):
            cache.prefetch([1, 2, 3], worker="127.0.0.1:1")
        cache.evict_first([1, 2, 3])


def test_operation_is_found_and_cancelled_by_another_client() -> None:
    with working(faulty()) as (_, served):
        id = begun(served)
        with connected(served) as store:
            (operation,) = store.operations()
            assert operation.id == id
            assert not operation.wait(0)
        with connected(served) as store, ThreadPoolExecutor(1) as threads:
            (operation,) = store.operations()
            waiting = threads.submit(operation.wait, WAIT_S)
            (again,) = store.operations()
            again.cancel()
            assert waiting.result() and operation.state == "cancelled"
            assert operation.message == "cancelled by anyone"
            assert store.stats()["operations_cancelled"] == 1


def test_draining_worker_cancels_its_operations_with_the_reason() -> None:
    with working(faulty()) as (_, served), connected(served) as store, ThreadPoolExecutor(1) as threads:
        begun(served)
        eventually(lambda: running(served))
        (operation,) = store.operations()
        waiting = threads.submit(operation.wait, WAIT_S)
        eventually(lambda: waiters(served))
        assert served.worker.drain(WAIT_S), "operations do not delay it"
        assert waiting.result()
        assert operation.state == "cancelled" and "drains" in operation.message
