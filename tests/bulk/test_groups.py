"""Small chunks of a stream arrive several at a time; an end of the stream between them is found at its place."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.address import Chain
from kvstore.buffers import Planes
from kvstore.client.bulk import receiving
from kvstore.client.bulk.links import BulkRefused, Link
from kvstore.client.bulk.receiving import Ask, ImageReceiver
from kvstore.client.fetching import ChunkFetch
from kvstore.client.remote import remote_port
from kvstore.namespace import Namespace
from kvstore.node.images import make_images
from kvstore.node.wanted import image_bytes, leading
from kvstore.sources import RandomIds
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel, LinkBroken
from kvstore.wire.bulk.frames import Kind, encode_head, encode_index
from tests.kit.transports import MEDIUM, linked, same, tokens_and_kv

COUNT, NUMBER, FIRST = 20, 3, 2
TOKENS, KV = tokens_and_kv(COUNT)
CHAIN = Chain.of(Namespace("m", MEDIUM), TOKENS.astype(np.uint32))
END = encode_head(Kind.END, NUMBER, 0)
REASON = pb.BulkRefusal(code=14, message="x" * 40_000).SerializeToString()
REFUSED = encode_head(Kind.REFUSED, NUMBER, len(REASON)) + REASON


def file(index: int, said: int | None = None) -> bytes:
    image = memoryview(bytearray(image_bytes(CHAIN, index)))
    make_images(CHAIN, [index], Planes(KV, MEDIUM.section_bytes), [image], RandomIds())
    head = encode_head(Kind.FILE, NUMBER, 8 + len(image))
    return head + encode_index(index if said is None else said) + bytes(image)


def planes(array: npt.NDArray[Any]) -> Planes:
    return Planes(array, MEDIUM.section_bytes)


def receiving_from(link: Link, first: int, stop: int, out: npt.NDArray[Any], done: bytearray) -> ImageReceiver:
    asked = Ask(NUMBER, CHAIN, first, stop, planes(out), range(stop))
    return ImageReceiver(link, asked, done)


@contextmanager
def stream_of(frames: Sequence[bytes], step_bytes: int) -> Iterator[Link]:
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


PAIRS = [
    (9_999, 0, True),
    (1 << 20, 0, False),
    (9_999, 300_000, True),
    (1 << 20, 300_000, False),
    (9_999, receiving.GROUP_BYTES, False),
    (1 << 20, receiving.GROUP_BYTES, True),
]
"""Sizes of a step and of a group, and whether native code receives: each pair of values."""


@pytest.mark.parametrize("case", ["whole", "end", "refused", "another", "damaged", "closed"])
def test_chunks_before_what_ends_a_stream_are_good(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    for step_bytes, group_bytes, natively in PAIRS:
        with monkeypatch.context() as patch:
            patch.setattr(receiving, "GROUP_BYTES", group_bytes)
            if not natively:
                patch.setattr(Channel, "moves_natively", False)
            check_stream(case, step_bytes)


def check_stream(case: str, step_bytes: int) -> None:
    broken, files = 9, [file(index) for index in range(FIRST, COUNT)]
    if case == "damaged":
        files[broken - FIRST] = files[broken - FIRST][:-1] + bytes([files[broken - FIRST][-1] ^ 1])
    elif case == "another":
        files[broken - FIRST] = file(broken, said=broken - 1)
    elif case != "whole":
        files[broken - FIRST :] = [{"end": END, "refused": REFUSED, "closed": b""}[case]]
    expected: dict[str, type[Exception]] = {
        "refused": BulkRefused,
        "another": LinkBroken,
        "closed": LinkBroken,
    }
    out, done = np.zeros_like(KV), bytearray(b"\1" * FIRST + bytes(COUNT - FIRST))
    failed: Exception | None = None
    is_right = case != "damaged"
    with stream_of([*files, b"" if case == "closed" else END], step_bytes) as link:
        try:
            assert receiving_from(link, FIRST, COUNT, out, done).receive() is is_right
        except (BulkRefused, LinkBroken) as error:
            failed = error
        is_alive = link.channel.alive
    assert type(failed) is expected.get(case, type(None))
    assert is_alive is (failed is None and is_right), "after an error nobody knows what comes next on the connection"
    size, good = MEDIUM.chunk_tokens, leading(done)
    assert good == (COUNT if case == "whole" else broken)
    assert same(out[:, :, FIRST * size : good * size], KV[:, :, FIRST * size : good * size])


def test_nothing_to_receive_is_only_the_end() -> None:
    with stream_of([END], 16) as link:
        assert receiving_from(link, 5, 5, KV, bytearray(5)).receive()
        assert link.channel.alive


def test_what_came_behind_a_miss_counts_no_more_once_it_is_asked_for_again() -> None:
    """It is written over: a stream that breaks off in the middle of it would leave half of each."""
    port = remote_port(["127.0.0.1:1"])
    try:
        fetch = ChunkFetch(CHAIN.namespace, CHAIN.tokens, pb.GetRequest(), COUNT, lambda _: planes(KV), port._tools)
        fetch.done[:3] = b"\1\0\1"
        request = fetch._request(range(1, COUNT))
        assert (request.first, request.chunks_max) == (1, COUNT)
        assert list(fetch.done) == [1] + [0] * (COUNT - 1)
    finally:
        port.close()
