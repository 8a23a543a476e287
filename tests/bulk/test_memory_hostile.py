"""Peers that lie about memory, slots and leases are cut off, and cost nobody else a byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvstore.client.limits import ClientLimits
from kvstore.client.pool import WorkerMemory
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.transport.channel import (
    FILES_MAX,
    SPAN_BYTES,
    Channel,
    FrameKind,
    Mode,
    decode_slots,
    decode_span,
    encode_request,
)
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.limits import WorkerLimits
from tests.kit.arenas import all_let_go, filled, leases_end, lose, memory_of, referenced_bytes, serving_memory
from tests.kit.patience import slowness
from tests.kit.transports import MEDIUM, greeted, is_cut_off, same, tokens_and_kv
from tests.kit.wire import opened, packed, raw_stub
from tests.kit.workers import WAIT_S, Served, connected, eventually

pytestmark = pytest.mark.slow
COUNT = 100
TOKENS, KV = tokens_and_kv(COUNT)


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving_memory(tmp_root, worker_limits=WorkerLimits(idle_s=slowness())) as found:
        filled(found, TOKENS, KV, MEDIUM)
        yield found
        eventually(lambda: found.worker.service.gate.inside_count == 0, "no call inside")
        all_let_go(found)
        assert found.worker.service.counters()["calls_failed"] == 0
        with connected(found, bulk="shared") as store:
            assert same(store.namespace("m", MEDIUM).get(TOKENS)[1], KV)


def request(served: Served, mode: int, *, memory_only: bool = False, name: str = "m", first: int = 0) -> bytes:
    with raw_stub(served) as stub:
        digest = opened(stub, MEDIUM, name)
    message = pb.GetRequest(namespace=digest, tokens=packed(TOKENS), memory_only=memory_only, first=first)
    return encode_request(WAIT_S, mode, message.SerializeToString())


def refusal_of(channel: Channel) -> str:
    return pb.BulkRefusal.FromString(channel.receive_frame(FrameKind.REFUSED)[1]).message


def leased(channel: Channel, served: Served) -> int:
    """Makes a GET of all chunks, which are all lent; returns the client's end of the lease."""
    channel.send(FrameKind.GET, 1, [request(served, Mode.SLOTS)])
    fds: list[int] = []
    for first, count in ((0, FILES_MAX), (FILES_MAX, COUNT - FILES_MAX)):
        lent = decode_slots(channel.receive_frame(FrameKind.SLOTS)[1])
        assert (lent.found, lent.first, len(lent.offsets)) == (COUNT, first, count)
        fds += channel.take_files(1 - len(fds))
    return fds[0]


def test_lease_without_a_connection_lasts_until_its_end_closes(served: Served) -> None:
    """Whoever has the client's end may be reading, whatever happens to the connection."""
    with greeted(served, "shared") as channel:
        end = leased(channel, served)
        channel.send(FrameKind.CHUNKS, 2)
        assert is_cut_off(channel)
    eventually(lambda: served.worker.service.bulk.connections_count == 0, "the connection ends")  # type: ignore[union-attr]
    assert referenced_bytes(served) > 0
    os.close(end)
    leases_end(served)


def test_lease_of_a_silent_client_occupies_no_thread(served: Served) -> None:
    with greeted(served, "shared") as channel:
        end = leased(channel, served)
        eventually(lambda: served.worker.service.gate.inside_count == 0, "no call inside")
        with suppress(BlockingIOError):
            while True:
                os.write(end, bytes(4096))  # is never read
        assert channel.is_quiet()
        assert len(served.worker.service.bulk_requests.leases or ()) == 1
        os.close(end)
        leases_end(served)


def test_get_beyond_the_limit_of_leases_is_given_files_or_bytes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = served.worker.service.bulk_requests.leases
    assert leases is not None
    monkeypatch.setattr(leases, "_leases_max", 1)
    with greeted(served, "shared") as one, greeted(served, "shared") as other:
        end = leased(one, served)
        other.send(FrameKind.GET, 1, [request(served, Mode.SLOTS)])
        assert decode_slots(other.receive_frame(FrameKind.SLOTS)[1]).offsets == ()
        assert other.receive_head().kind in (FrameKind.FILES, FrameKind.IMAGES)
        os.close(end)


def test_what_makes_no_sense_is_refused(served: Served) -> None:
    for case in ("map over tcp", "slots over tcp", "mode 3", "files and memory only", "hold"):
        with greeted(served, "tcp" if "tcp" in case else "shared") as channel:
            if case == "map over tcp":
                channel.send(FrameKind.MAP, 0)
            elif case == "hold":
                message = pb.GetRequest(hold=bytes(16), memory_only=True).SerializeToString()
                channel.send(FrameKind.GET, 1, [encode_request(WAIT_S, Mode.STREAM, message)])
            else:
                mode = {"slots over tcp": Mode.SLOTS, "mode 3": 3}.get(case, Mode.FILES)
                channel.send(FrameKind.GET, 1, [request(served, mode, memory_only="only" in case)])
            assert refusal_of(channel)


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_a_peer_gets_what_memory_has_and_nothing_else(served: Served, way: str) -> None:
    """P2: the root has all 100, memory the first 60 and some after a gap."""
    lose(served, filled(served, TOKENS, KV, MEDIUM), 60, 65)
    read = got_here(served)
    for first, stop in ((0, 60), (10, 60), (60, 60), (65, COUNT)):
        with greeted(served, way) as channel:
            channel.send(FrameKind.GET, 1, [request(served, Mode.STREAM, memory_only=True, first=first)])
            assert decode_slots(channel.receive_frame(FrameKind.SLOTS)[1]).found == stop
            index = first
            while index < stop:
                head = channel.receive_head()
                assert head.kind is FrameKind.IMAGES
                start, count = decode_span(channel.receive(SPAN_BYTES))
                assert start == index and count > 0
                for _ in range(count):
                    raw = memoryview(bytearray((head.length - SPAN_BYTES) // count))
                    channel.receive_into([raw])
                    assert bytes(raw[-MEDIUM.section_bytes :]) == _last_section(index)
                    index += 1
            eventually(channel.is_quiet, "the answer has no end frame if all came")
    assert got_here(served) == read, "a peer is no caller: it counts what it gives to its own"


def got_here(served: Served) -> list[int]:
    """What callers of this worker got, in chunks and bytes, from memory and from the root."""
    counts = served.member.node.counters.snapshot()
    return [counts[name] for name in ("memory_hits", "memory_bytes", "chunks_read", "bytes_read")]


def test_a_namespace_that_was_not_used_here_is_refused_without_a_look(served: Served) -> None:
    message = pb.GetRequest(namespace=bytes(32), tokens=packed(TOKENS), memory_only=True).SerializeToString()
    with greeted(served, "tcp") as channel:
        channel.send(FrameKind.GET, 1, [encode_request(WAIT_S, Mode.STREAM, message)])
        assert "not known here" in refusal_of(channel)


def _last_section(index: int) -> bytes:
    size = MEDIUM.chunk_tokens
    return KV[-1, 1, index * size : (index + 1) * size].tobytes()


def test_slots_outside_the_memory_are_not_looked_at(served: Served) -> None:
    for offset in (1, 4096 * 15 + 8, 4096 * 16, (1 << 64) - 4096):
        fd = os.dup(memory_of(served).arena.fd)
        memory = WorkerMemory(fd, memory_of(served).arena.size_bytes, b"", ClientLimits())
        outside = offset if offset != 4096 * 16 else memory_of(served).arena.size_bytes - 4096
        with closing(memory), pytest.raises(InvalidRequest):
            memory.images((0, outside), (8192, 8192))


def test_memory_that_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(Unavailable, match="seals"):
        WorkerMemory(fd, 4096, b"", ClientLimits())
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
