"""Images as bytes: those before the one that ends a stream are good."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client.failover import FileExecutor
from kvstore.client.pool import DataConnection
from kvstore.client.remote import Ask, ChunkFetch, ImageReceiver, RemoteTransport
from kvstore.codec.image import make_images
from kvstore.core.buffers import Planes
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.namespace import Namespace
from kvstore.format.keyset import ChunkKeys, leading
from kvstore.transport.channel import Channel, FrameKind, LentSlots, LinkBroken, encode_head, encode_span
from kvstore.transport.status import CallFailed
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.transports import MEDIUM, linked, same, tokens_and_kv

COUNT, NUMBER, FIRST = 20, 3, 2
TOKENS, KV = tokens_and_kv(COUNT)
CHAIN = ChunkKeys.of(Namespace("m", MEDIUM), TOKENS.astype(np.uint32))
END = encode_head(FrameKind.END, NUMBER, 0)
REASON = pb.BulkRefusal(code=14, message="x" * 40_000).SerializeToString()
REFUSED = encode_head(FrameKind.REFUSED, NUMBER, len(REASON)) + REASON


def images(first: int, count: int, said: int | None = None) -> bytes:
    """A frame with the images of some chunks."""
    made = [memoryview(bytearray(CHAIN.image_bytes(index))) for index in range(first, first + count)]
    make_images(CHAIN, range(first, first + count), Planes(KV, MEDIUM.section_bytes), made, RandomIds())
    content = encode_span(first if said is None else said, count) + b"".join(made)
    return encode_head(FrameKind.IMAGES, NUMBER, len(content)) + content


def planes(array: npt.NDArray[Any]) -> Planes:
    return Planes(array, MEDIUM.section_bytes)


def received(link: DataConnection, first: int, stop: int, out: npt.NDArray[Any], done: bytearray) -> bool:
    clock = SystemClock()
    asked = Ask(NUMBER, CHAIN, first, stop, planes(out), range(stop))
    return ImageReceiver(link, asked, done, FileExecutor(clock), Deadline(clock, 10.0)).receive(
        LentSlots(stop, first, ())
    )


@contextmanager
def stream_of(frames: Sequence[bytes], step_bytes: int) -> Iterator[DataConnection]:
    """A worker that sends these bytes in pieces of a given size, and closes."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            content = b"".join(frames)
            for at in range(0, len(content), step_bytes):
                try:
                    theirs.sendall(content[at : at + step_bytes])
                except OSError:
                    return

    sender = threading.Thread(target=send)
    channel = Channel(ours, 10)
    channel.limit(10, 10)
    sender.start()
    try:
        yield linked(channel)
    finally:
        channel.close()
        sender.join()


@pytest.mark.parametrize("case", ["whole", "end", "refused", "another", "damaged", "closed"])
def test_chunks_before_what_ends_a_stream_are_good(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """In frames of one image or of several, received natively or not."""
    for step_bytes, together, natively in ((9_999, 1, True), (1 << 20, 3, False), (9_999, 3, True), (1 << 20, 1, True)):
        with monkeypatch.context() as patch:
            if not natively:
                patch.setattr(Channel, "moves_natively", False)
            check_stream(case, step_bytes, together)


def check_stream(case: str, step_bytes: int, together: int) -> None:
    starts = range(FIRST, COUNT, together)
    frames, broken = [images(start, min(together, COUNT - start)) for start in starts], 3
    if case == "damaged":
        frames[broken] = frames[broken][:-1] + bytes([frames[broken][-1] ^ 1])
    elif case == "another":
        frames[broken] = images(starts[broken], together, said=starts[broken] - 1)
    elif case != "whole":
        frames[broken:] = [{"end": END, "refused": REFUSED, "closed": b""}[case]]
    expected: dict[str, type[Exception]] = {"refused": CallFailed, "another": LinkBroken, "closed": LinkBroken}
    out, done = np.zeros_like(KV), bytearray(b"\1" * FIRST + bytes(COUNT - FIRST))
    failed: Exception | None = None
    is_right = case != "damaged"
    with stream_of(frames, step_bytes) as link:
        try:
            assert received(link, FIRST, COUNT, out, done) is is_right
        except (CallFailed, LinkBroken) as error:
            failed = error
        is_alive = link.channel.alive
    assert type(failed) is expected.get(case, type(None))
    assert is_alive is (failed is None and is_right), "after an error nobody knows what comes next on the connection"
    size, good = MEDIUM.chunk_tokens, leading(done)
    bad = starts[broken] + (together - 1 if case == "damaged" else 0)
    assert good == (COUNT if case == "whole" else bad)
    assert same(out[:, :, FIRST * size : good * size], KV[:, :, FIRST * size : good * size])


def test_nothing_to_receive_ends_without_a_frame() -> None:
    with stream_of([], 16) as link:
        assert received(link, 5, 5, KV, bytearray(5))
        assert link.channel.alive


def test_what_came_behind_a_miss_counts_no_more_once_it_is_asked_for_again() -> None:
    """It is written over: a stream that breaks off in the middle of it would leave half of each."""
    port = RemoteTransport(["127.0.0.1:1"])
    try:
        fetch = ChunkFetch(CHAIN.namespace, CHAIN.tokens, pb.GetRequest(), COUNT, lambda _: planes(KV), port._caller)
        fetch.done[:3] = b"\1\0\1"
        request = fetch._request(range(1, COUNT))
        assert (request.first, request.chunks_max) == (1, COUNT)
        assert list(fetch.done) == [1] + [0] * (COUNT - 1)
    finally:
        port.close()
