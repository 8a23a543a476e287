"""A put over TCP is received straight into a worker's memory: the same bytes or nothing, and then its room is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore import Layout
from kvstore.buffers import planes_of
from kvstore.native import is_available
from kvstore.node.memory_puts import ROOM_SHARE, Room
from kvstore.node.view import View
from kvstore.node.write import Write
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import RUN_BYTES, Kind, encode_request, encode_span
from kvstore.wire.bulk.sums import plane_sums
from kvstore.worker.admission import Buffers
from kvstore.writes import WriteModeName
from tests.kit.arenas import MEMORY_BYTES, memory_of, serving_memory
from tests.kit.transports import MEDIUM, greeted, same, send_head, tokens_and_kv
from tests.kit.workers import WAIT_S, Served, connected, eventually, opened, packed, raw_stub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off"),
]
COUNT = 4
TOKENS, KV = tokens_and_kv(COUNT)
PLANES = planes_of(KV, MEDIUM)
ODD = Layout(layers=2, kv_heads=1, head_dim=24, dtype="int8", chunk_tokens=5)
"""Sections of 120 bytes, which cannot be summed as they come."""
WRITES = pytest.mark.parametrize("write", ["behind", None])
"""The client asks for it, or it is the worker's own way."""


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_memory() as found:
        yield found
        assert found.worker.service.counters()["calls_failed"] == 0


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of runs that took a buffer."""
    taken, take = [], Buffers.take

    def noted(self: Buffers, size_bytes: int) -> memoryview:
        taken.append(size_bytes)
        return take(self, size_bytes)

    monkeypatch.setattr(Buffers, "take", noted)
    return taken


def behind_bytes(served: Served) -> int:
    return int(served.member.node.stats()["behind_bytes"])


def is_as_before(served: Served) -> bool:
    """True if memory has no chunk, and nothing is claimed, reserved or in flight."""
    memory = memory_of(served)
    gone = memory.free_bytes == memory.size_bytes and not memory._filling
    return gone and not behind_bytes(served) and not served.worker.service.in_flight.count


def begin(served: Served, channel: Channel, *, behind: bool) -> None:
    with raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(TOKENS), write=pb.WRITE_BEHIND)
    channel.send(Kind.PUT, 1, [encode_request(WAIT_S, int(behind), start.SerializeToString())])
    channel.receive_frame(Kind.READY)


def run(first: int, count: int) -> bytearray:
    """A run as a client sends it: its planes and their checksums."""
    planes = [plane.tobytes() for row in PLANES.strided(first, count) for plane in row]
    return bytearray(b"".join(planes) + np.array(plane_sums(PLANES, first, count), "<u8").tobytes())


@WRITES
def test_a_prompt_comes_without_a_buffer_and_reaches_the_root(
    served: Served, write: WriteModeName | None, buffered: list[int]
) -> None:
    with connected(served, bulk="tcp", write=write) as store:
        cache = store.namespace("m", MEDIUM)
        result = cache.put(TOKENS, KV)
        assert (result.tokens_present, result.chunks_written) == (len(TOKENS), COUNT)
        assert not buffered
        assert same(cache.get(TOKENS)[1], KV)
        eventually(lambda: not behind_bytes(served), "it is on the root")
        assert served.worker.service.counters()["behind_written"] == COUNT
        assert memory_of(served).drop_namespace(cache.namespace.digest) == COUNT
        assert same(cache.get(TOKENS)[1], KV), "from the root"
        assert served.worker.service.counters()["memory_damaged"] == 0


@WRITES
def test_blocks_come_without_a_buffer_if_they_have_one_size(
    served: Served, write: WriteModeName | None, buffered: list[int]
) -> None:
    for sizes in ([MEDIUM.chunk_bytes] * 3, [1] * 3, [100, 3000, 7]):
        buffered.clear()
        blocks = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
        keys = [bytes([at]) * 16 for at in range(len(sizes))]
        with connected(served, bulk="tcp", write=write) as store:
            cache = store.namespace(f"of {sizes[0]}", MEDIUM)
            assert all(cache.blocks.put(keys, blocks))
            assert bool(buffered) == (len(set(sizes)) > 1)
            out = [np.zeros_like(block) for block in blocks]
            assert all(cache.blocks.get(keys, out))
            assert all(map(np.array_equal, out, blocks))
            assert all(cache.blocks.put([keys[0], keys[0]], [blocks[0], blocks[0]])), "given twice, and there"


@WRITES
def test_what_memory_cannot_take_as_it_comes_goes_through_a_buffer(
    served: Served, write: WriteModeName | None, buffered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, kv = tokens_and_kv(3, seed=1)
    odd = np.arange(ODD.layers * 2 * 10 * 24).astype(np.int8).reshape(ODD.shape(10))
    with connected(served, bulk="tcp", write=write) as store:
        cache = store.namespace("odd", ODD)
        cache.put(np.arange(10), odd)
        assert buffered
        assert np.array_equal(cache.get(np.arange(10))[1], odd)
        cache = store.namespace("m", MEDIUM)
        buffered.clear()
        monkeypatch.setattr(Channel, "moves_natively", False)
        cache.put(tokens, kv)
        assert buffered
        assert same(cache.get(tokens)[1], kv)


@WRITES
@pytest.mark.parametrize("kept", [0, 2])
def test_what_lies_behind_a_chunk_that_a_sweep_takes_is_left_out(
    served: Served, write: WriteModeName | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(served, bulk="tcp", write=write) as store:
        cache = store.namespace("m", MEDIUM)
        leading = View.leading
        monkeypatch.setattr(View, "leading", lambda view, chain: min(kept, leading(view, chain)))
        cache.put(TOKENS, KV)
        monkeypatch.undo()
        eventually(lambda: not behind_bytes(served), "it is on the root")
        assert cache.match(TOKENS) == kept * MEDIUM.chunk_tokens
        count, found = cache.get(TOKENS)
        assert count == kept * MEDIUM.chunk_tokens and same(found, KV[:, :, :count])


def test_a_prompt_for_which_memory_has_no_room_is_put(buffered: list[int]) -> None:
    """Chunks that find room are received straight into it; nobody waits for room."""
    chunks = MEMORY_BYTES // MEDIUM.chunk_bytes + 10
    tokens, kv = tokens_and_kv(chunks, seed=2)
    with serving_memory() as served, connected(served, bulk="tcp", write="behind") as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(tokens, kv)
        assert buffered
        eventually(lambda: cache.match(tokens) == len(tokens), "all of it is there")
        assert same(cache.get(tokens)[1], kv)


@pytest.mark.parametrize(
    ("place", "behind"),
    [(0, True), (MEDIUM.section_bytes, False), (5 * MEDIUM.section_bytes - 1, True), (-1, False), (-9, True)],
)
def test_i1_a_run_with_a_bit_turned_is_not_taken(served: Served, place: int, behind: bool) -> None:
    """Runs that came whole before it are taken."""
    wrong = run(2, 2)
    wrong[place] ^= 1
    with greeted(served, "tcp") as channel:
        begin(served, channel, behind=behind)
        channel.send(Kind.CHUNKS, 1, [encode_span(0, 2), run(0, 2)])
        channel.send(Kind.CHUNKS, 1, [encode_span(2, 2), wrong])
        _, payload = channel.receive_frame(Kind.REFUSED)
        assert "checksums" in pb.BulkRefusal.FromString(payload).message
    assert served.worker.service.counters()["wire_damaged"] == 1
    eventually(lambda: not memory_of(served)._filling, "room was given back")
    assert memory_of(served).stats()["memory_chunks"] == 2
    eventually(lambda: not behind_bytes(served) and not served.worker.service.in_flight.count, "nothing is reserved")


@pytest.mark.parametrize("behind", [True, False])
def test_room_for_a_client_that_goes_away_is_given_back(served: Served, behind: bool) -> None:
    with greeted(served, "tcp") as channel:
        begin(served, channel, behind=behind)
        content = run(0, COUNT)
        send_head(channel, Kind.CHUNKS, 1, 8 + len(content))
        channel.send_bytes([memoryview(encode_span(0, COUNT)), memoryview(content)[:300_000]])
        eventually(lambda: len(memory_of(served)._filling) == COUNT, "room is claimed")
    eventually(lambda: is_as_before(served), "all room was given back")
    with connected(served, bulk="tcp", write="behind") as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        assert same(cache.get(TOKENS)[1], KV)


def test_a_put_behind_is_in_memory_as_far_as_it_came(served: Served) -> None:
    """Claimed room keeps others out of memory."""
    with greeted(served, "tcp") as channel:
        begin(served, channel, behind=True)
        for first, count in ((0, 2), (2, 1)):
            channel.send(Kind.CHUNKS, 1, [encode_span(first, count), run(first, count)])
            there = first + count
            eventually(lambda: memory_of(served).stats()["memory_chunks"] == there, "it is there")  # noqa: B023
            eventually(lambda: not memory_of(served)._filling, "and ready")
        eventually(lambda: not behind_bytes(served), "and on the root")
        channel.send(Kind.CHUNKS, 1, [encode_span(3, 1), run(3, 1)])
        channel.receive_frame(Kind.STORED)
    with connected(served, bulk="tcp") as store:
        assert same(store.namespace("m", MEDIUM).get(TOKENS)[1], KV)


def test_clients_that_stop_sending_claim_a_share_of_memory_at_most(served: Served) -> None:
    """Claimed room cannot be read or evicted, and takes from the queue of what is written behind."""
    share = memory_of(served).size_bytes // ROOM_SHARE
    chunks = share // MEDIUM.chunk_bytes * 2 // 5
    assert chunks * MEDIUM.chunk_bytes <= RUN_BYTES
    with ExitStack() as stalled, raw_stub(served) as stub:
        for seed in range(5):
            tokens, kv = tokens_and_kv(chunks, seed)
            channel = stalled.enter_context(greeted(served, "tcp"))
            start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(tokens), write=pb.WRITE_BEHIND)
            channel.send(Kind.PUT, 1, [encode_request(WAIT_S, 1, start.SerializeToString())])
            channel.receive_frame(Kind.READY)
            content = bytearray(kv.tobytes())
            send_head(channel, Kind.CHUNKS, 1, 8 + len(content) + 8 * MEDIUM.section_count)
            channel.send_bytes([memoryview(encode_span(0, chunks)), memoryview(content)[: len(content) // 2]])
        eventually(lambda: sum(memory_of(served)._filling.values()) > share // 2, "room is claimed")
        eventually(lambda: served.worker.service.in_flight.count, "others came into buffers")
        assert sum(memory_of(served)._filling.values()) <= share
        assert behind_bytes(served) <= share
    eventually(lambda: is_as_before(served), "all room was given back")


def test_runs_are_as_large_as_memory_has_room_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run costs Python once, on both sides."""
    came: list[int] = []

    def room(write: Write, first: int, count: int) -> Room | None:
        came.append(count)
        return claim(write, first, count)

    claim = Write.room
    monkeypatch.setattr(Write, "room", room)
    monkeypatch.setattr(served.member.node.tiers, "run_bytes", RUN_BYTES + MEDIUM.chunk_bytes)
    chunks = RUN_BYTES // MEDIUM.chunk_bytes + 5
    tokens, kv = tokens_and_kv(chunks, seed=4)
    with connected(served, bulk="tcp", write="behind") as store:
        assert store.namespace("m", MEDIUM).put(tokens, kv).tokens_present == len(tokens)
        assert came == [chunks - 4, 4]
        assert same(store.namespace("m", MEDIUM).get(tokens)[1], kv)
