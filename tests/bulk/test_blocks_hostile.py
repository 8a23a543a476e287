"""Peers that lie about engine-hashed blocks are refused or cut off, and cost nobody else a byte."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.buffers import Pieces
from kvstore.client.bulk.given import Giving
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.memory import WorkerMemory
from kvstore.client.bulk.receiving import GROUP_BYTES, Ask, ImageReceiver
from kvstore.errors import InvalidRequest
from kvstore.format.checksum import checksum
from kvstore.format.header import Incarnation, encode, expected_block
from kvstore.namespace import Namespace
from kvstore.node.wanted import keyed
from kvstore.sections import Buffers
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel, LinkBroken, LinkLate
from kvstore.wire.bulk.frames import (
    FILES_MAX,
    INDEX_BYTES,
    Given,
    Kind,
    Mode,
    Placed,
    encode_arena,
    encode_head,
    encode_index,
    encode_placed,
    encode_request,
    encode_slots,
    encode_span,
)
from kvstore.wire.messages import pack_keys, pack_sizes
from kvstore.worker.limits import WorkerLimits
from tests.kit.arenas import all_let_go, serving_memory
from tests.kit.descriptors import open_before, open_now
from tests.kit.engine_blocks import blocks_of, buffers_for, keys_of, same
from tests.kit.patience import slowness
from tests.kit.transports import MEDIUM, greeted, is_closed, linked, send_head
from tests.kit.workers import WAIT_S, Served, connected, eventually, opened, raw_stub

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("way", ["shared", "tcp"])
COUNT = 6
SIZE = 10_000
KEYS, BLOCKS = keys_of(1, COUNT), blocks_of(1, COUNT, (SIZE,))


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving_memory(tmp_root, worker_limits=WorkerLimits(idle_s=slowness())) as found:
        with connected(found) as store:
            store.namespace("m", MEDIUM).blocks.put(KEYS[:4], BLOCKS[:4], write="through")
        yield found
        eventually(lambda: found.worker.service.gate.inside_count == 0, "no call inside")
        assert found.worker.service.in_flight.count == 0
        assert found.worker.service.counters()["calls_failed"] == 0
        all_let_go(found)
        with connected(found, bulk="shared") as store:
            buffers = buffers_for(BLOCKS[:4])
            assert store.namespace("m", MEDIUM).blocks.get(KEYS[:4], buffers) == [True] * 4
            assert same(buffers, BLOCKS[:4])


def digest_of(served: Served) -> bytes:
    with raw_stub(served) as stub:
        return opened(stub, MEDIUM)


def get_request(served: Served, mode: int) -> bytes:
    message = pb.GetRequest(namespace=digest_of(served), keys=pack_keys(KEYS), sizes=pack_sizes([SIZE] * COUNT))
    return encode_request(WAIT_S, mode, message.SerializeToString())


def put_request(served: Served, flag: int = 0, sizes: list[int] | None = None) -> bytes:
    start = pb.PutStart(namespace=digest_of(served), keys=pack_keys(KEYS), sizes=pack_sizes(sizes or [SIZE] * COUNT))
    return encode_request(WAIT_S, flag, start.SerializeToString())


def refusal_of(channel: Channel) -> str:
    return pb.BulkRefusal.FromString(channel.receive_frame(Kind.REFUSED)[1]).message


def nothing_new(served: Served) -> bool:
    with connected(served) as store:
        return not any(store.namespace("m", MEDIUM).blocks.present(KEYS[4:]))


def test_what_makes_no_sense_is_refused(served: Served) -> None:
    for case in ("slots over tcp", "files over tcp", "mode 3", "sizes", "keys", "namespace", "timeout"):
        digest, timeout_s = digest_of(served), WAIT_S
        keys, sizes = pack_keys(KEYS), pack_sizes([SIZE] * COUNT)
        mode = {"slots over tcp": Mode.SLOTS, "files over tcp": Mode.FILES, "mode 3": 3}.get(case, Mode.STREAM)
        if case == "sizes":
            sizes = sizes[:-1]
        elif case == "keys":
            keys = b"\x05short"
        elif case == "namespace":
            digest = bytes(32)
        elif case == "timeout":
            timeout_s = -1.0
        message = pb.GetRequest(namespace=digest, keys=keys, sizes=sizes).SerializeToString()
        with greeted(served, "tcp" if "tcp" in case else "shared") as channel:
            channel.send(Kind.GET, 1, [encode_request(timeout_s, mode, message)])
            assert refusal_of(channel)


def test_what_was_not_asked_for_is_not_given(served: Served) -> None:
    for mode in (Mode.FILES, Mode.SLOTS):
        for span in ((0, 65), (0, 0), (3, 4), (1 << 31, 1)):
            with greeted(served, "shared") as channel:
                channel.send(Kind.GET, 1, [get_request(served, mode)])
                channel.send(Kind.WANT, 1, [encode_span(*span)])
                assert "were asked for" in refusal_of(channel)


def test_each_block_wanted_is_answered_for(served: Served) -> None:
    """Four are in memory, two nowhere; files are handed over for reading only."""
    with greeted(served, "shared") as channel:
        channel.send(Kind.GET, 1, [get_request(served, Mode.SLOTS)])
        channel.send(Kind.WANT, 1, [encode_span(1, 5)])
        _, payload = channel.receive_frame(Kind.SLOTS)
        assert struct.unpack_from("<II", payload) == (1, 3)
        os.close(channel.take_files(1)[0])
        assert channel.receive_frame(Kind.ABSENT)[1] == encode_span(4, 2)
        channel.send(Kind.READ, 1, [encode_span(0, 3)])
        channel.send(Kind.GET, 2, [get_request(served, Mode.FILES)])
        channel.send(Kind.WANT, 2, [encode_span(3, 3)])
        assert channel.receive_frame(Kind.FILES)[1] == encode_span(3, 1)
        fd = channel.take_files(1)[0]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(fd)
        assert channel.receive_frame(Kind.ABSENT)[1] == encode_span(4, 2)
        channel.send(Kind.READ, 2, [encode_span(0, 1)])
        channel.send(Kind.GET, 3, [get_request(served, Mode.STREAM)])
        found = set()
        while (head := channel.receive_head()).kind is Kind.FILE:
            image = channel.receive(head.length)
            found.add(struct.unpack_from("<I", image)[0])
            assert image[-SIZE:] == BLOCKS[struct.unpack_from("<I", image)[0]].tobytes()
        assert head.kind is Kind.END
        assert found == {0, 1, 2, 3}


@BOTH
def test_blocks_that_are_not_as_announced_store_nothing(served: Served, way: str) -> None:
    for length, span in (
        (8, (0, 1)),
        (1 << 40, (0, 1)),
        (8 + SIZE + 8, (1, 1)),
        (8 + 2 * SIZE + 8, (0, 2)),
        (8, (0, 0)),
        (8 + (COUNT + 1) * (SIZE + 8), (0, COUNT + 1)),
    ):
        with greeted(served, way) as channel:
            channel.send(Kind.PUT, 1, [put_request(served)])
            channel.receive_frame(Kind.READY)
            send_head(channel, Kind.CHUNKS, 1, length)
            channel.send_bytes([memoryview(encode_span(*span))])
            with socket.socket(fileno=os.dup(channel.fileno())) as sock:
                assert is_closed(sock)
        assert nothing_new(served)


@BOTH
def test_more_than_a_run_in_one_frame_is_refused(served: Served, way: str) -> None:
    with greeted(served, way) as channel:
        channel.send(Kind.PUT, 1, [put_request(served, sizes=[2 << 20] * COUNT)])
        channel.receive_frame(Kind.READY)
        send_head(channel, Kind.CHUNKS, 1, 8 + 5 * ((2 << 20) + 8))
        channel.send_bytes([memoryview(encode_span(0, 5))])
        with socket.socket(fileno=os.dup(channel.fileno())) as sock:
            assert is_closed(sock)
    eventually(lambda: served.worker.service.in_flight.count == 0, "all memory is given back")


@BOTH
def test_bytes_that_do_not_match_their_checksums_are_not_stored(served: Served, way: str) -> None:
    def run_case(flag: int) -> None:
        with greeted(served, way) as channel:
            channel.send(Kind.PUT, 1, [put_request(served, flag)])
            channel.receive_frame(Kind.READY)
            channel.send(Kind.CHUNKS, 1, [encode_span(0, COUNT), bytes(COUNT * (SIZE + 8))])
            if flag:
                channel.receive_frame(Kind.STORED)
            else:
                assert "checksums" in refusal_of(channel)
        eventually(lambda: not served.worker.service.behind.chunks_count, "nothing is on its way")
        assert nothing_new(served)
        counters = served.worker.service.counters()
        assert counters["puts_behind_lost" if flag else "wire_damaged"] == 1

    for flag in (0, 1):
        run_case(flag)


def test_blocks_placed_outside_the_arena_are_refused(served: Served) -> None:
    for flag in (0, 1):
        for offset in (1, 1 << 20, (1 << 64) - 4096):
            fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, COUNT * SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            with greeted(served, "shared") as channel:
                channel.send(Kind.ARENA, 0, [encode_arena(COUNT * SIZE)], [fd])
                os.close(fd)
                channel.send(Kind.PUT, 1, [put_request(served, flag)])
                channel.receive_frame(Kind.READY)
                channel.send(Kind.PLACED, 1, [encode_placed(Placed(0, COUNT, offset))])
                assert "arena" in refusal_of(channel)
            assert nothing_new(served)


@BOTH
def test_any_frames_leave_the_worker_as_it_was(served: Served, way: str) -> None:
    """Frames of a get and a put of blocks in any order, with any numbers: answered, refused or cut off."""
    for seed in range(12):
        choose = random.Random(seed)
        with greeted(served, way) as channel:
            channel.limit(0.05, 5.0)
            put = choose.random() < 0.3
            with suppress(LinkBroken, LinkLate):
                if put:
                    channel.send(Kind.PUT, 1, [put_request(served, choose.choice([0, 1]))])
                else:
                    channel.send(Kind.GET, 1, [get_request(served, choose.choice([*Mode]))])
                for _ in range(12):
                    kind = choose.choice(
                        [Kind.WANT, Kind.WANT, Kind.WANT, Kind.READ, Kind.ABSENT, Kind.CHUNKS, Kind.PLACED]
                    )
                    span = encode_span(choose.choice([0, 1, 5, 6, 1 << 31]), choose.choice([0, 1, 6, 64, 1 << 31]))
                    channel.send(kind, 1, [span])
                while True:
                    channel.receive_some([memoryview(bytearray(1 << 16))])


def both_ends(memory: WorkerMemory | None = None) -> tuple[Channel, Link]:
    """A worker's end that tests speak for, and the client's."""
    ours, theirs = socket.socketpair()
    return Channel(theirs, WAIT_S), linked(Channel(ours, WAIT_S), memory)


LIES = [
    (Kind.FILES, encode_span(0, 0), 0),
    (Kind.FILES, encode_span(0, 2), 1),
    (Kind.SLOTS, encode_slots(Given(0, (0, 4096))), 0),
    (Kind.SLOTS, encode_slots(Given(0, tuple(range(0, 4096 * 11, 4096)))), 1),
]
"""Frames that answer no request for ten chunks or blocks, and the number of files with each."""
LIES_ABOUT_CHUNKS = [
    *LIES,
    (Kind.SLOTS, encode_slots(Given(1, (0,))), 1),
    (Kind.SLOTS, encode_span(0, 0), 1),
    (Kind.SLOTS, encode_span(0, FILES_MAX + 1) + bytes(8 * (FILES_MAX + 1)), 1),
    (Kind.SLOTS, encode_span(0, 3) + bytes(16), 1),
    (Kind.SLOTS, b"", 1),
    (Kind.MEMORY, bytes(8), 1),
    (Kind.START, b"", 0),
]
LIES_ABOUT_BLOCKS = [
    *LIES,
    *((Kind.ABSENT, encode_span(*span), 0) for span in ((0, 0), (1, 1), (0, 11), (0, 1 << 31))),
    (Kind.ELSEWHERE, encode_span(0, 0), 0),
    (Kind.END, b"", 0),
    (Kind.FILE, encode_index(0), 0),
]


@pytest.mark.parametrize(("has_gaps", "lies"), [(False, LIES_ABOUT_CHUNKS), (True, LIES_ABOUT_BLOCKS)])
def test_worker_with_wrong_frames_is_left(has_gaps: bool, lies: list[tuple[Kind, bytes, int]]) -> None:
    """And none of the files that it gave stays open."""
    for kind, payload, files in lies:
        before = open_before()
        memory = object.__new__(WorkerMemory)
        memory.id, memory.leases = b"", set()
        worker, link = both_ends(memory)
        reading, writing = os.pipe()
        worker.send(kind, 1, [payload], [writing] * files)
        os.close(reading)
        os.close(writing)
        with Giving(link, 1, Mode.SLOTS, has_gaps=has_gaps) as giving, pytest.raises((LinkBroken, InvalidRequest)):
            list(giving.each(0, 10))
        del giving
        worker.close()
        link.close()
        assert open_now() <= before, (kind, payload)


def image_of(namespace: Namespace, at: int) -> bytes:
    """A block's whole file."""
    return image_with(namespace, KEYS[at], BLOCKS[at].tobytes())


def image_with(namespace: Namespace, key: bytes, payload: bytes) -> bytes:
    expected = expected_block(namespace, key, len(payload))
    return bytes(encode(expected, Incarnation(bytes(16)), [checksum(payload)])) + payload


def stream_to(link: Link, namespace: Namespace, buffers: list[npt.NDArray[np.uint8]], done: bytearray) -> ImageReceiver:
    """The first blocks on their way into ``buffers``."""
    count = len(buffers)
    wanted = keyed(namespace, KEYS[:count], list(map(len, buffers)))
    return ImageReceiver(link, Ask(1, wanted, 0, count, Buffers([each.data for each in buffers]), range(count)), done)


def test_an_image_that_is_not_right_is_no_hit() -> None:
    """The images before it are hits; nothing is written into the other buffers."""
    for case in ("another", "twice", "unknown", "short", "long", "payload", "header", "ends"):
        namespace = Namespace("m", MEDIUM)
        images = [image_of(namespace, at) for at in range(2)]
        second = bytearray(images[1])
        at = {"another": 2, "twice": 0, "unknown": 1 << 31}.get(case, 1)
        if case == "short":
            second = second[:-1]
        elif case == "long":
            second += b"x"
        elif case in ("payload", "header"):
            second[{"payload": 5000, "header": 60}[case]] ^= 1
        worker, link = both_ends()
        worker.send(Kind.FILE, 1, [encode_index(0), images[0]])
        if case != "ends":
            worker.send(Kind.FILE, 1, [encode_index(at), second])
        worker.send(Kind.END, 1)
        done, buffers, is_right = bytearray(3), [np.zeros(SIZE, np.uint8) for _ in range(3)], False
        with suppress(LinkBroken):
            is_right = stream_to(link, namespace, buffers, done).receive()
        assert list(done) == [1, 0, 0]
        assert np.array_equal(buffers[0], BLOCKS[0])
        assert link.channel.alive == is_right == (case == "ends")
        if case not in ("another", "payload"):
            assert not buffers[2].any()
        worker.close()
        link.close()


def test_an_image_that_comes_a_packet_at_a_time_is_not_copied_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays where it is until it is whole: half a MiB would be copied hundreds of times."""
    worker, link = both_ends()
    namespace, payload = Namespace("m", MEDIUM), random.Random(3).randbytes(500_000)
    image = image_with(namespace, KEYS[0], payload)
    packets = memoryview(encode_head(Kind.FILE, 1, INDEX_BYTES + len(image)) + encode_index(0) + image)
    buffers, done = [np.zeros(len(payload), np.uint8)], bytearray(1)
    worker.send(Kind.END, 1)
    monkeypatch.setattr(Channel, "receive_some", lambda channel, pieces, bytes_max=0: one_packet(pieces))
    sent_bytes = 0

    def one_packet(pieces: Pieces) -> int:
        nonlocal sent_bytes
        packet = packets[sent_bytes : sent_bytes + 1448]
        pieces[0][: len(packet)] = packet
        sent_bytes += len(packet)
        return len(packet)

    tracemalloc.start()
    try:
        assert stream_to(link, namespace, buffers, done).receive()
        assert tracemalloc.get_traced_memory()[1] < GROUP_BYTES + len(image) // 2
    finally:
        tracemalloc.stop()
    assert buffers[0].tobytes() == payload
    worker.close()
    link.close()
