"""A put over TCP arrives in a worker's memory itself: the same bytes or nothing, and then its slots are free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore import Layout
from kvstore.core.buffers import planes_of
from kvstore.native import is_available
from kvstore.tiers.stack import ARRIVING_SHARE
from kvstore.transport.channel import RUN_BYTES, Channel, FrameKind, encode_request, encode_span, plane_sums
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.arenas import memory_of, serving_memory
from tests.kit.memory_tiers import empty
from tests.kit.transports import MEDIUM, greeted, same, send_head, tokens_and_kv
from tests.kit.wire import opened, packed, raw_stub
from tests.kit.workers import WAIT_S, Served, connected, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off"),
]
COUNT = 4
TOKENS, KV = tokens_and_kv(COUNT)
PLANES = planes_of(KV, MEDIUM)
ODD = Layout(layers=2, kv_heads=1, head_dim=24, dtype="int8", chunk_tokens=5)
"""Sections of 120 bytes, which cannot be summed as they arrive."""


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_memory() as found:
        yield found
        assert found.worker.service.counters()["calls_failed"] == 0


def filling_bytes(served: Served) -> int:
    return sum(memory_of(served)._filling.values())


def is_unused(served: Served) -> bool:
    """True if memory has no chunk, and nothing is claimed, queued or in flight."""
    memory, behind = memory_of(served), served.member.node.stats()["behind_bytes"]
    is_free = memory.free_bytes == memory.size_bytes and not filling_bytes(served)
    return is_free and not behind and not served.worker.service.in_flight.count


def begin(served: Served, channel: Channel) -> None:
    with raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(TOKENS), write=pb.WRITE_BEHIND)
    channel.send(FrameKind.PUT, 1, [encode_request(WAIT_S, 0, start.SerializeToString())])
    channel.receive_frame(FrameKind.READY)


def run(first: int, count: int) -> bytearray:
    """A run as a client sends it: its planes and their checksums."""
    planes = [plane.tobytes() for row in PLANES.strided(first, count) for plane in row]
    return bytearray(b"".join(planes) + np.array(plane_sums(PLANES, first, count), "<u8").tobytes())


def test_put_over_tcp_is_stored_in_memory_and_on_the_root(served: Served) -> None:
    odd = np.arange(ODD.layers * 2 * 10 * 24).astype(np.int8).reshape(ODD.shape(10))
    with connected(served, bulk="tcp", write="behind") as store:
        for name, layout, tokens, kv in (("m", MEDIUM, TOKENS, KV), ("odd", ODD, np.arange(10), odd)):
            cache = store.namespace(name, layout)
            count = len(tokens) // layout.chunk_tokens
            result = cache.put(tokens, kv)
            assert (result.tokens_present, result.chunks_written) == (len(tokens), count)
            assert np.array_equal(cache.get(tokens)[1].view(np.uint8), kv.view(np.uint8))
            eventually(lambda: not served.member.node.stats()["behind_bytes"], "all of it is on the root")
            assert empty(memory_of(served), cache.namespace) == count
            assert np.array_equal(cache.get(tokens)[1].view(np.uint8), kv.view(np.uint8)), "from the root"
        cache = store.namespace("m", MEDIUM)
        for sizes in ([MEDIUM.chunk_bytes] * 3, [1] * 3, [100, 3000, 7]):
            blocks = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
            keys = [sizes[0].to_bytes(8, "little") + bytes([at]) * 8 for at in range(len(sizes))]
            assert all(cache.blocks.put([*keys, keys[0]], [*blocks, blocks[0]])), "one is given twice"
            out = [np.zeros_like(block) for block in blocks]
            assert all(cache.blocks.get(keys, out))
            assert all(map(np.array_equal, out, blocks))
        assert served.worker.service.counters()["memory_damaged"] == 0


@pytest.mark.parametrize("place", [0, MEDIUM.section_bytes, 5 * MEDIUM.section_bytes - 1, -1])
def test_i1_a_run_with_a_bit_turned_is_not_stored(served: Served, place: int) -> None:
    """Runs that arrived whole before it are stored."""
    wrong = run(2, 2)
    wrong[place] ^= 1
    with greeted(served, "tcp") as channel:
        begin(served, channel)
        channel.send(FrameKind.CHUNKS, 1, [encode_span(0, 2), run(0, 2)])
        channel.send(FrameKind.CHUNKS, 1, [encode_span(2, 2), wrong])
        _, payload = channel.receive_frame(FrameKind.REFUSED)
        assert "checksums" in pb.BulkRefusal.FromString(payload).message
    assert served.worker.service.counters()["wire_damaged"] == 1
    eventually(lambda: not filling_bytes(served), "its slots were given back")
    assert memory_of(served).stats()["memory_chunks"] == 2
    eventually(lambda: not served.member.node.stats()["behind_bytes"], "nothing is reserved in the queue")


def test_run_cut_short_gives_its_slots_back(served: Served) -> None:
    with greeted(served, "tcp") as channel:
        begin(served, channel)
        content = run(0, COUNT)
        send_head(channel, FrameKind.CHUNKS, 1, 8 + len(content))
        channel.send_bytes([memoryview(encode_span(0, COUNT)), memoryview(content)[:300_000]])
        eventually(lambda: len(memory_of(served)._filling) == COUNT, "slots are claimed")
    eventually(lambda: is_unused(served), "all slots were given back")
    with connected(served, bulk="tcp", write="behind") as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        assert same(cache.get(TOKENS)[1], KV)


def test_stalled_clients_claim_a_share_of_memory_at_most(served: Served) -> None:
    share = memory_of(served).size_bytes // ARRIVING_SHARE
    chunks = share // MEDIUM.chunk_bytes * 2 // 5
    assert chunks * MEDIUM.chunk_bytes <= RUN_BYTES
    with ExitStack() as stalled, raw_stub(served) as stub:
        for seed in range(5):
            tokens, kv = tokens_and_kv(chunks, seed)
            channel = stalled.enter_context(greeted(served, "tcp"))
            start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(tokens), write=pb.WRITE_BEHIND)
            channel.send(FrameKind.PUT, 1, [encode_request(WAIT_S, 0, start.SerializeToString())])
            channel.receive_frame(FrameKind.READY)
            content = bytearray(kv.tobytes())
            send_head(channel, FrameKind.CHUNKS, 1, 8 + len(content) + 8 * MEDIUM.section_count)
            channel.send_bytes([memoryview(encode_span(0, chunks)), memoryview(content)[: len(content) // 2]])
        eventually(lambda: filling_bytes(served) > share // 2, "slots are claimed")
        eventually(lambda: served.worker.service.in_flight.count, "other runs come into buffers")
        assert filling_bytes(served) <= share
    eventually(lambda: is_unused(served), "all slots were given back")
