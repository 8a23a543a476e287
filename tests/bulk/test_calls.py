"""Short calls give the same on every way, and any failure on a bulk connection leaves them to gRPC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.cache import Cache
from kvstore.errors import Overloaded
from kvstore.segments import Rope
from kvstore.transport.channel import SHORT_CALLS, Channel, FrameKind, encode_request
from kvstore.transport.messages import parse, traced
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.transports import MEDIUM, WAYS, greeted, tokens_and_kv
from tests.kit.wire import opened, raw_stub
from tests.kit.workers import WAIT_S, Served, connected, serving

pytestmark = pytest.mark.slow
PATHS = {"shared": "unix", "tcp": "tcp", "grpc": "grpc"}
TOKENS, KV = tokens_and_kv(5)
KEY = b"k" * 16


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving(tmp_root) as found:
        yield found
        assert found.worker.service.counters()["calls_failed"] == 0


def stored(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    assert cache.blocks.put([KEY], [b"x" * 100]) == [True]


def counted(served: Served) -> Counter[tuple[str, str]]:
    """The short calls that have ended, by method and path."""
    ended: Counter[tuple[str, str]] = Counter()
    for each, count in served.worker.service.calls.ended().items():
        if each.method in SHORT_CALLS:
            ended[each.method, each.path] += count
    return ended


@pytest.mark.parametrize("way", WAYS)
def test_a_short_call_gives_the_same_on_every_way(served: Served, way: str) -> None:
    with connected(served, bulk="grpc") as store:
        stored(store.namespace("m", MEDIUM))
    before = counted(served)
    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        blocks = cache.blocks
        keys, content = [bytes([number]) * 16 for number in range(3)], [b"x" * 100] * 2
        assert blocks.put(keys[:2], content) == [True, True]
        segments = cache.segments(Rope(10_000.0, MEDIUM.head_dim))
        segments.put(TOKENS[:128], KV[:, :, :128])

        assert blocks.match(keys) == 2
        assert blocks.present(keys) == [True, True, False]
        assert [(each.start, each.end) for each in segments.find(TOKENS[:128], [0])] == [(0, 128)]
        with cache.hold(TOKENS) as hold:
            assert hold.tokens == len(TOKENS)
            assert len(served.worker.service.holds) == 1
        assert len(served.worker.service.holds) == 0
        with segments.hold(segments.find(TOKENS[:128], [0])) as held:
            assert sum(map(len, held.matches)) == 128
    assert set(counted(served) - before) == {(method, PATHS[way]) for method in SHORT_CALLS}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_breaks_leaves_the_call_to_grpc(
    served: Served, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the call never came. After: it was answered, and the answer was lost."""
    real, cuts = Channel.send, [0]

    def cut(channel: Channel, kind: FrameKind, *arguments: object) -> None:
        if kind is {"before": FrameKind.CALL, "after": FrameKind.ANSWER}[when]:
            cuts[0] += 1
            channel.cut()
        real(channel, kind, *arguments)  # type: ignore[arg-type]

    with connected(served, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        stored(cache)
        monkeypatch.setattr(Channel, "send", cut)
        assert cache.blocks.match([KEY]) == 1
        assert cuts == [1]
        assert counted(served)["MatchBlocks", "grpc"] == 1
        monkeypatch.undo()
        assert cache.get(TOKENS)[0] == len(TOKENS)
        assert cache.blocks.match([KEY]) == 1
        assert store.stats()["client_misses_unreachable"] == 0
        assert store.stats()["client_bulk_broken"] == 1
    assert counted(served)["MatchBlocks", "unix"] >= 1


def test_a_refusal_keeps_its_class_and_its_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(served, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        stored(cache)
        monkeypatch.setattr(served.worker.service.holds, "holds_max", 0)
        for _ in range(3):
            with pytest.raises(Overloaded, match="hold at most 0"):
                cache.hold(TOKENS)
        monkeypatch.undo()
        with cache.hold(TOKENS) as hold:
            assert hold.tokens == len(TOKENS)
        assert served.worker.service.counters()["bulk_connections"] == 1
    assert counted(served)["Hold", "unix"] == 4


@pytest.mark.parametrize("number", [len(SHORT_CALLS), 255])
def test_a_call_that_is_not_known_is_refused(served: Served, number: int) -> None:
    with greeted(served, "shared") as channel:
        channel.send(FrameKind.CALL, 1, [encode_request(WAIT_S, number, b"")])
        _, payload = channel.receive_frame(FrameKind.REFUSED)
        assert "is not known" in parse(pb.BulkRefusal, payload).message


def test_a_call_whose_bytes_changed_on_the_way_is_refused(served: Served) -> None:
    with raw_stub(served) as stub, greeted(served, "shared") as channel:
        message = bytearray(traced(pb.MatchBlocksRequest(namespace=opened(stub, MEDIUM), keys=bytes(400))))
        message[60] ^= 1
        channel.send(FrameKind.CALL, 1, [encode_request(WAIT_S, 0, bytes(message))])
        _, payload = channel.receive_frame(FrameKind.REFUSED)
        assert "changed on the way" in parse(pb.BulkRefusal, payload).message
