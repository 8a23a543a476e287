"""Writing behind waits while a call moves a client's bytes (rule W6 of MEMORY.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.node import write_behind
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import Kind, Mode, encode_request, encode_span
from kvstore.wire.messages import pack_keys, pack_sizes
from tests.kit.arenas import serving_memory
from tests.kit.transports import MEDIUM, greeted, tokens_and_kv
from tests.kit.workers import WAIT_S, Served, connected, eventually, opened, packed, raw_stub

TOKENS, KV = tokens_and_kv(2)
OTHER_TOKENS, OTHER_KV = tokens_and_kv(2, seed=1)
KEYS, SIZES = pack_keys([b"k" * 16]), pack_sizes([MEDIUM.chunk_bytes])
FOR_EVER_S = 3600.0


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_memory() as found:
        yield found


def put(channel: Channel, namespace: bytes) -> None:
    start = pb.PutStart(namespace=namespace, tokens=packed(OTHER_TOKENS))
    channel.send(Kind.PUT, 1, [encode_request(WAIT_S, 0, start.SerializeToString())])
    channel.receive_frame(Kind.READY)


def put_blocks(channel: Channel, namespace: bytes) -> None:
    start = pb.PutBlocksStart(namespace=namespace, keys=KEYS, sizes=SIZES)
    channel.send(Kind.PUT_BLOCKS, 1, [encode_request(WAIT_S, 0, start.SerializeToString())])
    channel.receive_frame(Kind.READY)


def get(channel: Channel, namespace: bytes) -> None:
    request = pb.GetRequest(namespace=namespace, tokens=packed(OTHER_TOKENS))
    channel.send(Kind.GET, 1, [encode_request(WAIT_S, Mode.SLOTS, request.SerializeToString())])
    channel.receive_frame(Kind.START)


def get_blocks(channel: Channel, namespace: bytes) -> None:
    request = pb.GetBlocksRequest(namespace=namespace, keys=KEYS, sizes=SIZES)
    channel.send(Kind.GET_BLOCKS, 1, [encode_request(WAIT_S, Mode.SLOTS, request.SerializeToString())])
    channel.send(Kind.WANT, 1, [encode_span(0, 1)])
    channel.receive_frame(Kind.ELSEWHERE)  # of a root without files nothing is known here


@pytest.mark.parametrize("begin", [put, put_blocks, get, get_blocks])
def test_w6_what_is_queued_waits_until_the_call_ends(
    served: Served, begin: Callable[[Channel, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "HOLD_S", FOR_EVER_S)
    monkeypatch.setattr(write_behind, "MOVING_S", FOR_EVER_S)
    node = served.member.node
    with raw_stub(served) as stub, connected(served) as store:
        namespace = opened(stub, MEDIUM)
        with greeted(served, "shared") as channel:
            begin(channel, namespace)
            assert store.namespace("m", MEDIUM).put(TOKENS, KV).chunks_written == 2
            time.sleep(4 * write_behind.AFTER_S)
            assert node.stats()["behind_bytes"] > 0
        eventually(lambda: not node.stats()["behind_bytes"], "it is written")


@pytest.mark.parametrize("begin", [get, get_blocks])
def test_w6_a_get_holds_less_than_a_put(
    served: Served, begin: Callable[[Channel, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "HOLD_S", FOR_EVER_S)
    monkeypatch.setattr(write_behind, "MOVING_S", FOR_EVER_S)
    tiers = served.member.node.tiers
    assert tiers is not None
    with raw_stub(served) as stub, connected(served) as store:
        namespace = opened(stub, MEDIUM)
        with greeted(served, "shared") as channel:
            begin(channel, namespace)
            assert tiers.behind.reserve(tiers.behind.bytes_max // 2)
            store.namespace("m", MEDIUM).put(TOKENS, KV)
            eventually(lambda: tiers.behind.size_bytes == tiers.behind.bytes_max // 2, "it is written")
            assert tiers.behind._moving, "the get goes on"
            tiers.behind.give_back(tiers.behind.bytes_max // 2)
