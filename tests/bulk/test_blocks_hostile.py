"""Peers that lie about engine-hashed blocks are refused or cut off, and cost nobody else a byte."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client.failover import FileExecutor
from kvstore.client.limits import ClientLimits
from kvstore.client.pool import DataConnection, WorkerMemory
from kvstore.client.remote import Ask, ImageReceiver
from kvstore.core.buffers import BlockBuffers
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest
from kvstore.format.header import expected_block
from kvstore.format.keyset import BlockKeys
from kvstore.transport.channel import (
    NOT_LENT,
    SPAN_BYTES,
    Channel,
    FrameKind,
    LentSlots,
    LinkBroken,
    LinkLate,
    Mode,
    decode_slots,
    decode_span,
    encode_request,
    encode_slots,
    encode_span,
)
from kvstore.transport.messages import pack_keys, pack_sizes
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.limits import WorkerLimits
from tests.kit.arenas import all_let_go, serving_memory
from tests.kit.descriptors import open_before, open_now
from tests.kit.engine_blocks import blocks_of, buffers_for, keys_of, same
from tests.kit.images import encoded
from tests.kit.patience import slowness
from tests.kit.transports import MEDIUM, greeted, linked
from tests.kit.wire import opened, raw_stub
from tests.kit.workers import WAIT_S, Served, connected, eventually

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


def put_request(served: Served) -> bytes:
    start = pb.PutStart(namespace=digest_of(served), keys=pack_keys(KEYS), sizes=pack_sizes([SIZE] * COUNT))
    return encode_request(WAIT_S, 0, start.SerializeToString())


def test_each_block_wanted_is_answered_for(served: Served) -> None:
    """Four are in memory, two nowhere; files are handed over for reading only."""
    with greeted(served, "shared") as channel:
        channel.send(FrameKind.GET, 1, [get_request(served, Mode.SLOTS)])
        lent = decode_slots(channel.receive_frame(FrameKind.SLOTS)[1])
        os.close(channel.take_files(1)[0])
        assert [offset == NOT_LENT for offset in lent.offsets] == [False] * 4 + [True] * 2
        channel.receive_frame(FrameKind.END)
        channel.send(FrameKind.GET, 2, [get_request(served, Mode.FILES)])
        assert decode_slots(channel.receive_frame(FrameKind.SLOTS)[1]).offsets == ()
        assert channel.receive_frame(FrameKind.FILES)[1] == encode_span(0, 4)
        for fd in channel.take_files(4):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            os.close(fd)
        channel.receive_frame(FrameKind.END)
        channel.send(FrameKind.TAKEN, 2)
        channel.send(FrameKind.GET, 3, [get_request(served, Mode.STREAM)])
        channel.receive_frame(FrameKind.SLOTS)
        head = channel.receive_head()
        assert head.kind is FrameKind.IMAGES
        images = channel.receive(head.length)
        assert decode_span(images[:SPAN_BYTES]) == (0, 4)
        parts = np.split(np.frombuffer(images[SPAN_BYTES:], np.uint8), 4)
        assert all(part[-SIZE:].tobytes() == block.tobytes() for part, block in zip(parts, BLOCKS[:4], strict=True))
        channel.receive_frame(FrameKind.END)


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
                    channel.send(FrameKind.PUT, 1, [put_request(served)])
                else:
                    channel.send(FrameKind.GET, 1, [get_request(served, choose.choice([*Mode]))])
                for _ in range(12):
                    kind = choose.choice(
                        [FrameKind.TAKEN, FrameKind.TAKEN, FrameKind.END, FrameKind.CHUNKS, FrameKind.PLACED]
                    )
                    span = encode_span(choose.choice([0, 1, 5, 6, 1 << 31]), choose.choice([0, 1, 6, 64, 1 << 31]))
                    channel.send(kind, 1, [span])
                while True:
                    channel.receive_some([memoryview(bytearray(1 << 16))])


def both_ends(memory: WorkerMemory | None = None) -> tuple[Channel, DataConnection]:
    """A worker's end that tests speak for, and the client's."""
    ours, theirs = socket.socketpair()
    return Channel(theirs, WAIT_S), linked(Channel(ours, WAIT_S), memory)


LIES = [
    (FrameKind.FILES, encode_span(0, 0), 0),
    (FrameKind.FILES, encode_span(0, 2), 1),
    (FrameKind.FILES, encode_span(9, 2), 2),
    (FrameKind.SLOTS, encode_slots(LentSlots(10, 0, (0, 4096))), 0),
    (FrameKind.SLOTS, encode_slots(LentSlots(11, 0, tuple(range(0, 4096 * 11, 4096)))), 1),
    (FrameKind.SLOTS, encode_slots(LentSlots(10, 9, (0,))) + bytes(8), 1),
    (FrameKind.SLOTS, encode_span(10, 0) + bytes(7), 1),
    (FrameKind.SLOTS, b"", 1),
    (FrameKind.IMAGES, encode_span(0, 0), 0),
    (FrameKind.IMAGES, encode_span(0, 1), 0),
    (FrameKind.IMAGES, b"", 0),
    (FrameKind.MEMORY, bytes(8), 1),
]
"""Frames that answer no request for ten blocks, and the number of files with each."""


def test_worker_with_wrong_frames_is_left() -> None:
    """And none of the files that it gave stays open."""
    executor = FileExecutor(SystemClock())
    for kind, payload, files in LIES:
        before = open_before()
        memory = object.__new__(WorkerMemory)
        memory.id, memory.leases, memory._leases_max = b"", set(), ClientLimits().leases_max
        worker, link = both_ends(memory)
        reading, writing = os.pipe()
        worker.send(kind, 1, [payload], [writing] * files)
        os.close(reading)
        os.close(writing)
        receiver = stream_to(link, Namespace("m", MEDIUM), buffers_for([BLOCKS[0]] * 10), bytearray(10), executor)
        with pytest.raises((LinkBroken, InvalidRequest)):
            receiver.receive(LentSlots(10, 0, ()))
        del receiver
        worker.close()
        link.close()
        assert open_now() <= before, (kind, payload)
    executor.close()


def image_of(namespace: Namespace, at: int) -> bytes:
    """A block's whole file."""
    return image_with(namespace, KEYS[at], BLOCKS[at].tobytes())


def image_with(namespace: Namespace, key: bytes, payload: bytes) -> bytes:
    return encoded(expected_block(namespace, key, len(payload)), payload)


def stream_to(
    link: DataConnection,
    namespace: Namespace,
    buffers: list[npt.NDArray[np.uint8]],
    done: bytearray,
    executor: FileExecutor | None = None,
) -> ImageReceiver:
    """The first blocks on their way into ``buffers``."""
    clock = SystemClock()
    count = len(buffers)
    wanted = BlockKeys.of(namespace, keys_of(1, count), list(map(len, buffers)))
    asked = Ask(1, wanted, 0, count, BlockBuffers([each.data for each in buffers]), range(count))
    return ImageReceiver(link, asked, done, executor or FileExecutor(clock), Deadline(clock, WAIT_S))


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
        worker.send(FrameKind.IMAGES, 1, [encode_span(0, 1), images[0]])
        if case != "ends":
            worker.send(FrameKind.IMAGES, 1, [encode_span(at, 1), second])
        worker.send(FrameKind.END, 1)
        done, buffers, is_right = bytearray(3), [np.zeros(SIZE, np.uint8) for _ in range(3)], False
        with suppress(LinkBroken):
            is_right = stream_to(link, namespace, buffers, done).receive(LentSlots(3, 0, ()))
        assert list(done) == [1, 0, 0]
        assert np.array_equal(buffers[0], BLOCKS[0])
        assert link.channel.alive == is_right == (case == "ends")
        if case not in ("another", "payload"):
            assert not buffers[2].any()
        worker.close()
        link.close()
