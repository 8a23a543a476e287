"""Short calls give the same on every way, and any failure on a bulk connection leaves them to gRPC."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.bulk import memory
from kvstore.client.bulk.links import Links
from kvstore.client.limits import ClientLimits
from kvstore.errors import Overloaded
from kvstore.namespace import Namespace, NamespaceDigest
from kvstore.segments import Rope
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import CONTROL_BYTES_MAX, SHORT_CALLS, Kind, encode_request
from kvstore.wire.limits import BLOCKS_MAX
from kvstore.wire.messages import pack_sizes, parse
from kvstore.wire.traces import traced
from tests.bulk.memories import serving_memory
from tests.bulk.ways import MEDIUM, WAYS, greeted, tokens_and_kv
from tests.patience import stretched
from tests.worker.serving import WAIT_S, Served, connected, eventually, opened, raw_stub, serving, worker_process

pytestmark = pytest.mark.slow
PATHS = {"shared": "unix", "tcp": "tcp", "grpc": "grpc"}
BOTH = pytest.mark.parametrize("way", ["shared", "tcp"])
TOKENS, KV = tokens_and_kv(5)


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving(tmp_root) as found:
        yield found
        assert found.worker.service.counters()["calls_failed"] == 0


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
        store.namespace("m", MEDIUM).put(TOKENS, KV)
    before = counted(served)
    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        blocks = cache.blocks
        keys, content = [bytes([number]) * 16 for number in range(3)], [b"x" * 100] * 2
        assert blocks.put(keys[:2], content) == [True, True]
        segments = cache.segments(Rope(10_000.0, MEDIUM.head_dim))
        segments.put(TOKENS[:128], KV[:, :, :128])

        assert cache.match(np.concatenate([TOKENS, TOKENS])) == len(TOKENS)
        assert blocks.match(keys) == 2
        assert blocks.present(keys) == [True, True, False]
        assert [(each.start, each.end) for each in segments.find(TOKENS[:128], [0])] == [(0, 128)]
        with cache.hold(TOKENS) as hold:
            assert hold.tokens == len(TOKENS)
            assert len(served.worker.service.holds) == 1
        assert len(served.worker.service.holds) == 0
        with segments.find_held(TOKENS[:128], [0]) as held:
            assert sum(map(len, held.matches)) == 128
    assert set(counted(served) - before) == {(method, PATHS[way]) for method in SHORT_CALLS}


def test_an_answer_larger_than_other_frames_may_be_is_read(served: Served) -> None:
    keys = [number.to_bytes(16, "little") for number in range(BLOCKS_MAX)]
    with connected(served, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        assert cache.blocks.put(keys[7:8], [b"x" * 100]) == [True]
        found = store._port.block_sizes(cache.blocks._namespace, keys)
    assert found == [0] * 7 + [100] + [0] * (BLOCKS_MAX - 8)
    assert len(pack_sizes(found)) > CONTROL_BYTES_MAX
    assert counted(served) == {("MatchBlocks", "unix"): 1}


@BOTH
def test_a_namespace_that_a_worker_does_not_know_is_opened_and_asked_for_again(
    served: Served, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answers = served.member.find_namespace, [None]

    def unknown_once(digest: NamespaceDigest) -> Namespace | None:
        return answers.pop() if answers else real(digest)

    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        monkeypatch.setattr(served.member, "find_namespace", unknown_once)
        assert cache.match(TOKENS) == len(TOKENS)
        assert store.stats()["client_namespaces_reopened"] == 1


@BOTH
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_breaks_leaves_the_call_to_grpc(
    served: Served, way: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the call never came. After: it was answered, and the answer was lost."""
    real, cuts = Channel.send, [0]

    def cut(channel: Channel, kind: Kind, *arguments: object) -> None:
        if kind is {"before": Kind.CALL, "after": Kind.ANSWER}[when]:
            cuts[0] += 1
            channel.cut()
        real(channel, kind, *arguments)  # type: ignore[arg-type]

    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        monkeypatch.setattr(Channel, "send", cut)
        assert cache.match(TOKENS) == len(TOKENS)
        assert cuts == [1]
        assert counted(served)["Match", "grpc"] == 1
        monkeypatch.undo()
        assert cache.match(TOKENS) == len(TOKENS)
        assert store.stats()["client_misses_unreachable"] == 0
    assert counted(served)["Match", PATHS[way]] >= 1


@BOTH
def test_an_answer_that_makes_no_sense_leaves_the_call_to_grpc(
    served: Served, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Channel.send

    def wrong(channel: Channel, kind: Kind, *arguments: object) -> None:
        real(channel, Kind.STORED if kind is Kind.ANSWER else kind, *arguments)  # type: ignore[arg-type]

    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        monkeypatch.setattr(Channel, "send", wrong)
        assert cache.match(TOKENS) == len(TOKENS)
    assert counted(served)["Match", "grpc"] == 1


@BOTH
def test_a_refusal_keeps_its_class_and_the_next_call_is_answered(
    served: Served, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        monkeypatch.setattr(served.worker.service.holds, "holds_max", 0)
        with pytest.raises(Overloaded, match="hold at most 0"):
            cache.hold(TOKENS)
        monkeypatch.undo()
        with cache.hold(TOKENS) as hold:
            assert hold.tokens == len(TOKENS)
    assert counted(served)["Hold", PATHS[way]] == 2


@BOTH
def test_a_frozen_worker_is_a_miss_in_the_time_of_a_match(tmp_root: Path, way: str) -> None:
    limits = stretched(ClientLimits(match_s=1.0, probe_s=0.5), "match_s", "probe_s")
    with worker_process(tmp_root) as worker, connected(worker.address, bulk=way, limits=limits) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        assert cache.match(TOKENS) == len(TOKENS)
        worker.send(signal.SIGSTOP)
        assert cache.match(TOKENS) == 0
        worker.send(signal.SIGCONT)
        eventually(lambda: cache.match(TOKENS) == len(TOKENS), "the client comes back to the worker")


@BOTH
def test_a_killed_worker_is_a_miss(tmp_root: Path, way: str) -> None:
    with worker_process(tmp_root) as worker, connected(worker.address, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        assert cache.match(TOKENS) == len(TOKENS)
        worker.kill()
        assert cache.match(TOKENS) == 0


def test_more_calls_at_once_than_connections_go_over_grpc(served: Served) -> None:
    limits = ClientLimits(bulk_links_max=1)
    with connected(served, bulk="shared", limits=limits) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        links: Links = next(iter(store._port.endpoints.every())).bulk  # type: ignore[attr-defined]
        with links.link(WAIT_S) as link:
            assert link is not None
            assert cache.match(TOKENS) == len(TOKENS)
        assert counted(served)["Match", "grpc"] == 1


@pytest.mark.parametrize("number", [len(SHORT_CALLS), 255])
def test_a_call_that_is_not_known_is_refused(served: Served, number: int) -> None:
    with greeted(served, "shared") as channel:
        channel.send(Kind.CALL, 1, [encode_request(WAIT_S, number, b"")])
        _, payload = channel.receive_frame(Kind.REFUSED)
        assert "is not known" in parse(pb.BulkRefusal, payload).message


def test_a_call_whose_bytes_changed_on_the_way_is_refused(served: Served) -> None:
    with raw_stub(served) as stub, greeted(served, "shared") as channel:
        message = bytearray(traced(pb.MatchRequest(namespace=opened(stub, MEDIUM), tokens=bytes(400))))
        message[60] ^= 1
        channel.send(Kind.CALL, 1, [encode_request(WAIT_S, 0, bytes(message))])
        _, payload = channel.receive_frame(Kind.REFUSED)
        assert "changed on the way" in parse(pb.BulkRefusal, payload).message


def test_a_client_that_only_asks_maps_no_pages_of_the_workers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[object] = []
    monkeypatch.setattr(memory, "follow", lambda *arguments: followed.append(arguments))
    with serving_memory() as served, connected(served, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        assert cache.match(TOKENS) == len(TOKENS)
        assert not followed
        for _ in range(2):
            assert cache.get(TOKENS)[0] == len(TOKENS)
        assert len(followed) == 1
