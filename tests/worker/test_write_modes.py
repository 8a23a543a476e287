"""Puts with a write mode, through real workers that have memory."""

from __future__ import annotations

import pytest

from kvstore.core.results import PutResult
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.cases import for_each
from tests.kit.memory_workers import caching, working
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import same
from tests.kit.tiers import faulty, held
from tests.kit.wire import chain_of, images_of, opened, packed, put_messages, raw_stub, refused, sections_of

WAIT_S = PATIENCE_S
pytestmark = pytest.mark.slow


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
