"""Peers that lie, stay silent or send garbage are cut off, and nobody else notices."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.transport.channel import (
    CONTROL_BYTES_MAX,
    HEAD_BYTES,
    NONCE_BYTES,
    PLACED,
    Channel,
    FrameKind,
    Grant,
    decode_head,
    encode_head,
    encode_request,
    encode_span,
)
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.limits import WorkerLimits
from tests.kit.patience import stretched
from tests.kit.transports import (
    MEDIUM,
    dialled,
    greeted,
    is_closed,
    is_cut_off,
    offered,
    same,
    send_head,
    shared_memory,
    tokens_and_kv,
)
from tests.kit.wire import opened, packed, raw_stub
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("way", ["shared", "tcp"])
LIMITS = stretched(WorkerLimits(hello_s=0.5, idle_s=1.0, bulk_connections_max=20), "hello_s", "idle_s")
TOKENS, KV = tokens_and_kv(4)


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving(tmp_root, worker_limits=LIMITS) as found:
        yield found
        eventually(lambda: found.worker.service.gate.inside_count == 0, "no call inside")
        assert found.worker.service.in_flight.count == 0
        assert len(found.member.node.holds) == 0
        assert found.worker.service.counters()["calls_failed"] == 0


def refused_count(served: Served) -> int:
    return served.worker.service.counters()["bulk_refused"]


def put_request(served: Served) -> bytes:
    with raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(TOKENS))
    return encode_request(WAIT_S, 0, start.SerializeToString())


def serves_others(served: Served, way: str) -> None:
    tokens, kv = tokens_and_kv(3, seed=99)
    with connected(served, bulk=way) as store:
        cache = store.namespace("others", MEDIUM)
        cache.put(tokens, kv)
        assert same(cache.get(tokens)[1], kv)


@BOTH
def test_whoever_proves_no_grant_is_cut_off(served: Served, way: str) -> None:
    for said in (
        b"GET / HTTP/1.1\r\nHost: worker\r\n" + b"\r\n" * 60,
        bytes(200),
        os.urandom(200),
        encode_head(FrameKind.HELLO, 0, 1 << 60) + bytes(100),
        encode_head(FrameKind.GET, 0, 64) + bytes(64),
        encode_head(FrameKind.HELLO, 0, 64) + bytes(64),
    ):
        before = refused_count(served)
        with dialled(served, way) as sock:
            sock.sendall(said)
            assert is_closed(sock)
        assert refused_count(served) == before + 1, said
        serves_others(served, way)


@BOTH
def test_a_grant_is_good_for_one_connection_and_a_short_time(served: Served, way: str) -> None:
    answer = offered(served)
    grant = Grant(answer.grant, answer.secret)
    for attempt in range(2):
        with dialled(served, way) as sock:
            sock.sendall(encode_head(FrameKind.HELLO, 0, 64) + grant.hello(os.urandom(NONCE_BYTES)))
            sock.settimeout(WAIT_S)
            assert bool(sock.recv(1)) == (attempt == 0)
    late = offered(served)
    eventually(lambda: len(dialled_late(served, way, late)) == 0, "a grant that is over is void")


def dialled_late(served: Served, way: str, answer: pb.OpenBulkResponse) -> bytes:
    """Greets with a grant that has expired; returns the answer."""
    with dialled(served, way) as sock:
        sock.settimeout(WAIT_S)
        sock.recv(1)  # closed for its silence
    with dialled(served, way) as sock:
        grant = Grant(answer.grant, answer.secret)
        sock.sendall(encode_head(FrameKind.HELLO, 0, 64) + grant.hello(os.urandom(NONCE_BYTES)))
        sock.settimeout(WAIT_S)
        return sock.recv(1)


@BOTH
def test_a_wrong_proof_uses_the_grant_up(served: Served, way: str) -> None:
    answer = offered(served)
    for secret in (bytes(32), answer.secret):
        with dialled(served, way) as sock:
            sock.sendall(
                encode_head(FrameKind.HELLO, 0, 64) + Grant(answer.grant, secret).hello(os.urandom(NONCE_BYTES))
            )
            assert is_closed(sock)
    assert refused_count(served) == 2


@BOTH
def test_silent_connections_are_closed_and_do_not_keep_others_out(served: Served, way: str) -> None:
    silent = [dialled(served, way) for _ in range(15)]
    serves_others(served, way)
    for sock in silent:
        assert is_closed(sock)
        sock.close()
    assert refused_count(served) == 15


@BOTH
def test_more_connections_than_allowed_are_closed_at_once(served: Served, way: str) -> None:
    many = [dialled(served, way) for _ in range(40)]
    eventually(lambda: refused_count(served) >= 20, "those over the limit are closed")
    for sock in many:
        assert is_closed(sock)
        sock.close()
    serves_others(served, way)


@BOTH
def test_a_request_that_drips_is_cut_off(served: Served, way: str) -> None:
    with greeted(served, way) as channel:
        send_head(channel, FrameKind.GET, 1, 1000)
        assert is_cut_off(channel)
    serves_others(served, way)


@BOTH
def test_a_frame_that_makes_no_sense_ends_the_connection(served: Served, way: str) -> None:
    for kind, length in (
        (FrameKind.GET, 1 << 50),
        (FrameKind.ARENA, 1 << 20),
        (FrameKind.CHUNKS, 1 << 50),
        (FrameKind.WELCOME, 0),
        (FrameKind.TAKEN, 8),
    ):
        with greeted(served, way) as channel:
            send_head(channel, kind, 1, length)
            assert is_cut_off(channel)
        serves_others(served, way)


@BOTH
def test_chunks_that_are_not_as_announced_store_nothing(served: Served, way: str) -> None:
    request = put_request(served)
    for length, span in [
        (8, (0, 1)),
        (1 << 40, (0, 1)),
        (8 + 4 * MEDIUM.chunk_bytes, (1, 3)),
        (8, (0, 0)),
        (8, (0, 5)),
        (8 + 2 * (MEDIUM.chunk_bytes + 8), (0, 2)),
    ]:
        with greeted(served, way) as channel:
            channel.send(FrameKind.PUT, 1, [request])
            channel.receive_frame(FrameKind.READY)
            send_head(channel, FrameKind.CHUNKS, 1, length)
            channel.send_bytes([memoryview(encode_span(*span))])
            assert is_cut_off(channel)
    assert served.member.node.counters.snapshot()["chunks_written"] == 0
    serves_others(served, way)


@BOTH
def test_bytes_that_do_not_match_their_checksums_are_refused(served: Served, way: str) -> None:
    with greeted(served, way) as channel:
        channel.send(FrameKind.PUT, 1, [put_request(served)])
        channel.receive_frame(FrameKind.READY)
        wrong = bytes(4 * MEDIUM.chunk_bytes + 8 * MEDIUM.section_count)
        channel.send(FrameKind.CHUNKS, 1, [encode_span(0, 4), wrong])
        _, payload = channel.receive_frame(FrameKind.REFUSED)
        refusal = pb.BulkRefusal.FromString(payload)
        assert "checksums" in refusal.message
    assert served.member.node.counters.snapshot()["chunks_written"] == 0
    assert served.worker.service.counters()["wire_damaged"] == 1


def share(channel: Channel, fd: int, size_bytes: int) -> None:
    channel.send(FrameKind.ARENA, 0, [struct.pack("<Q", size_bytes)], [fd])
    os.close(fd)


def test_an_arena_that_could_kill_the_worker_is_refused(served: Served, tmp_path: Path) -> None:
    for case in ("unsealed", "shorter", "a file", "nothing", "huge"):
        size_bytes = 1 << 20
        with greeted(served, "shared") as channel:
            if case == "unsealed":
                share(channel, shared_memory(size_bytes, fcntl.F_SEAL_GROW), size_bytes)
            elif case == "shorter":
                share(channel, shared_memory(size_bytes // 2, fcntl.F_SEAL_SHRINK), size_bytes)
            elif case == "a file":
                (tmp_path / "file").write_bytes(bytes(size_bytes))
                share(channel, os.open(tmp_path / "file", os.O_RDONLY), size_bytes)
            elif case == "huge":
                share(channel, shared_memory(size_bytes, fcntl.F_SEAL_SHRINK), 1 << 62)
            else:
                channel.send(FrameKind.ARENA, 0, [struct.pack("<Q", size_bytes)])
            if case == "nothing":
                assert is_cut_off(channel)
            else:
                _, payload = channel.receive_frame(FrameKind.REFUSED)
                assert "arena" in pb.BulkRefusal.FromString(payload).message
        serves_others(served, "shared")


def test_chunks_placed_outside_the_arena_are_refused(served: Served) -> None:
    for offset in (1, 1 << 20, (1 << 64) - 4096):
        size_bytes = 4 * MEDIUM.chunk_bytes
        with greeted(served, "shared") as channel:
            share(channel, shared_memory(size_bytes, fcntl.F_SEAL_SHRINK), size_bytes)
            channel.send(FrameKind.PUT, 1, [put_request(served)])
            channel.receive_frame(FrameKind.READY)
            channel.send(FrameKind.PLACED, 1, [PLACED.pack(0, 4, offset)])
            _, payload = channel.receive_frame(FrameKind.REFUSED)
            assert "arena" in pb.BulkRefusal.FromString(payload).message
        assert served.member.node.counters.snapshot()["chunks_written"] == 0


def test_a_client_that_changes_its_arena_harms_only_itself(served: Served) -> None:
    """The hashed and the written bytes may then differ: a damaged chunk, which is a miss for everybody."""
    tokens, _ = tokens_and_kv(4, seed=5)
    size_bytes = 4 * MEDIUM.chunk_bytes
    with raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(tokens)).SerializeToString()
    for _ in range(10):
        with greeted(served, "shared") as channel:
            fd = shared_memory(size_bytes, fcntl.F_SEAL_SHRINK)
            writable = os.dup(fd)
            share(channel, fd, size_bytes)
            channel.send(FrameKind.PUT, 1, [encode_request(WAIT_S, 1, start)])
            channel.receive_frame(FrameKind.READY)
            channel.send(FrameKind.PLACED, 1, [PLACED.pack(0, 4, 0)])
            for _ in range(20):
                os.pwrite(writable, os.urandom(size_bytes // 4), 0)
            os.close(writable)
            channel.receive_frame(FrameKind.STORED)
        with connected(served) as store:
            cache = store.namespace("m", MEDIUM)
            found = [cache.get(tokens) for _ in range(2)]
            # Either a chunk is a miss, or it is the same for everybody, whatever its writer meant it to be.
            assert found[1][0] <= found[0][0]
            assert same(found[0][1][:, :, : found[1][0]], found[1][1])
            cache.clear()
        serves_others(served, "shared")


def test_a_head_is_checked_before_its_length_is_believed() -> None:
    for raw in (b"", b"KV", bytes(HEAD_BYTES), encode_head(FrameKind.TAKEN, 1, CONTROL_BYTES_MAX + 1)):
        with pytest.raises((InvalidRequest, struct.error)):
            decode_head(raw)
    longer = CONTROL_BYTES_MAX + 1
    assert decode_head(encode_head(FrameKind.ANSWER, 1, longer)).length == longer, "an answer may be longer"


def test_worker_without_the_secret_is_not_welcome() -> None:
    grant, other, nonce = Grant.fresh(), Grant.fresh(), b"n" * NONCE_BYTES
    assert grant.is_welcome(nonce, grant.welcome(nonce))
    assert not grant.is_welcome(nonce, other.welcome(nonce))
    assert not grant.is_welcome(nonce, grant.welcome(bytes(NONCE_BYTES)))


def test_proof_of_the_client_is_no_welcome() -> None:
    grant, nonce = Grant.fresh(), b"n" * NONCE_BYTES
    proof_of_client = grant.hello(nonce)[-len(grant.welcome(nonce)) :]
    assert grant.is_hello(nonce, proof_of_client)
    assert not grant.is_welcome(nonce, proof_of_client)
