"""Chunks over a socket by native code: the same bytes and sums as by Python, however they are cut up on the way."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import Layout
from kvstore.client.remote import Natively
from kvstore.codec.image import make_images
from kvstore.core.buffers import Planes
from kvstore.core.clock import RandomIds
from kvstore.core.namespace import Namespace
from kvstore.format.header import Damaged, checksum
from kvstore.format.keyset import ChunkKeys
from kvstore.native import is_available
from kvstore.transport.channel import Channel, LinkBroken, LinkLate, plane_sums, receive_planes, send_run
from tests.kit.stores import LARGE, LAYOUTS

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")

COUNT, FIRST = 5, 2
WAIT_S = 10.0
Kv = npt.NDArray[np.uint8]


def chain_of(layout: Layout) -> ChunkKeys:
    tokens = np.random.default_rng(1).integers(0, 1 << 31, COUNT * layout.chunk_tokens).astype(np.uint32)
    return ChunkKeys.of(Namespace.of("m", layout), tokens)


def kv_of(layout: Layout) -> Kv:
    shape = (layout.layers, 2, COUNT * layout.section_bytes)
    return np.random.default_rng(2).integers(0, 256, shape, np.uint8)


def image_of(layout: Layout, kv: Kv, index: int) -> bytes:
    chain = chain_of(layout)
    image = memoryview(bytearray(chain.image_bytes(index)))
    make_images(chain, [index], Planes(kv, layout.section_bytes), [image], RandomIds())
    return bytes(image)


def part(kv: Kv, layout: Layout, index: int) -> Kv:
    return kv[..., index * layout.section_bytes : (index + 1) * layout.section_bytes]


@contextmanager
def fed(content: bytes, seed: int, idle_s: float = WAIT_S, *, closes: bool = True) -> Iterator[Channel]:
    """A connection by which these bytes come, cut up anyhow; then it is closed, or nothing more comes."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def feed() -> None:
        cuts, at = random.Random(seed), 0
        try:
            while at < len(content):
                size = cuts.choice([1, 3, 100, 4096, 70_000, 1 << 20])
                theirs.sendall(content[at : at + size])
                at += size
        except OSError:
            return
        if closes:
            theirs.close()

    feeder = threading.Thread(target=feed)
    feeder.start()
    channel = Channel(ours, idle_s)
    channel.limit(idle_s, WAIT_S)
    try:
        yield channel
    finally:
        channel.close()
        theirs.close()
        feeder.join()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_comes_in_whatever_steps_lies_in_its_sections(layout: Layout) -> None:
    for seed in range(4):
        kv, out, after = kv_of(layout), np.zeros_like(kv_of(layout)), b"the next frame"
        content = b"".join(image_of(layout, kv, index) for index in range(FIRST, COUNT)) + after
        natively = Natively(chain_of(layout), FIRST, COUNT, Planes(out, layout.section_bytes))
        with fed(content, seed) as channel:
            for index in range(FIRST, COUNT):
                natively.receive(channel, index)
                assert np.array_equal(part(out, layout, index), part(kv, layout, index))
            assert channel.receive(len(after)) == after, "not a byte more was taken"
        assert not out[..., : FIRST * layout.section_bytes].any(), "nothing else was written"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_i1_a_bit_that_turned_on_the_way_is_noticed_wherever_it_is(layout: Layout) -> None:
    kv = kv_of(layout)
    image, header_bytes = image_of(layout, kv, 3), chain_of(layout).image_bytes(3) - layout.chunk_bytes
    places = {0, 50, header_bytes - 1, header_bytes, len(image) - 1, *random.Random(4).sample(range(len(image)), 30)}
    # The incarnation is any; that the header's own checksum covers it is what makes a change of it known.
    for place in sorted(places):
        turned = bytearray(image)
        turned[place] ^= 1 << place % 8
        out = np.zeros_like(kv)
        natively = Natively(chain_of(layout), 3, 4, Planes(out, layout.section_bytes))
        with fed(bytes(turned), 1) as channel, pytest.raises(Damaged):
            natively.receive(channel, 3)


def test_a_peer_that_goes_away_in_the_middle_breaks_the_connection() -> None:
    for came_bytes in (0, 10, 9000, 400_000):
        kv, out = kv_of(LARGE), np.zeros_like(kv_of(LARGE))
        natively = Natively(chain_of(LARGE), 3, 4, Planes(out, LARGE.section_bytes))
        with fed(image_of(LARGE, kv, 3)[:came_bytes], 1) as channel:
            with pytest.raises(LinkBroken):
                natively.receive(channel, 3)
            assert not channel.alive


def test_a_peer_that_falls_silent_is_waited_for_no_longer_than_is_allowed() -> None:
    kv, out = kv_of(LARGE), np.zeros_like(kv_of(LARGE))
    natively = Natively(chain_of(LARGE), 3, 4, Planes(out, LARGE.section_bytes))
    with fed(image_of(LARGE, kv, 3)[:-1], 1, 0.2, closes=False) as channel:
        with pytest.raises(LinkLate):
            natively.receive(channel, 3)
        assert not channel.alive


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_sent_is_the_run_and_its_sums_are_those_of_its_planes(layout: Layout) -> None:
    def run_case(first: int, count: int) -> None:
        kv = kv_of(layout)
        planes = Planes(kv, layout.section_bytes)
        expected = b"".join(plane.tobytes() for row in planes.strided(first, count) for plane in row)
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        channel = Channel(ours, WAIT_S)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the channel made it large
        channel.limit(WAIT_S, WAIT_S)
        came: list[bytes] = []

        def take() -> None:
            while piece := theirs.recv(99_999):
                came.append(piece)

        taker = threading.Thread(target=take)
        taker.start()
        send_run(channel, planes, first, count)
        channel.close()
        taker.join()
        theirs.close()
        assert b"".join(came) == expected + np.array(plane_sums(planes, first, count), "<u8").tobytes()

    for first, count in ((0, COUNT), (2, 1), (1, 3)):
        run_case(first, count)


@pytest.mark.parametrize("natively", [True, False])
def test_planes_are_received_with_their_sums(natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for size_bytes in (1, 300, 5000, (256 << 10) + 1, (512 << 10) + 2048, 1_000_003):
        if not natively:
            monkeypatch.setattr(Channel, "moves_natively", False)
        planes = np.random.default_rng(5).integers(0, 256, (2, size_bytes), np.uint8)
        sums = np.array(plane_sums(Planes(planes.reshape(1, 2, -1), size_bytes), 0, 1), "<u8").tobytes()
        for turned in (None, 0, size_bytes - 1, 2 * size_bytes - 1, 2 * size_bytes + 15):
            content, out = bytearray(planes.tobytes() + sums), np.zeros_like(planes)
            if turned is not None:
                content[turned] ^= 1
            with fed(bytes(content) + b"next", turned or 0) as channel:
                assert receive_planes(channel, [out[0].data, out[1].data]) is (turned is None)
                assert channel.receive(4) == b"next"
            assert turned is not None or np.array_equal(out, planes)


def test_blocks_of_one_size_or_of_several_are_received_and_compared() -> None:
    for sizes in ((100,) * 3, (1,), (600 << 10,) * 2, (100, 3000, 7), (0, 5)):
        blocks = [np.random.default_rng(6).integers(0, 256, size, np.uint8) for size in sizes]
        sums = np.array([checksum(block.data) for block in blocks], "<u8").tobytes()
        content = b"".join(block.tobytes() for block in blocks) + sums
        for turned in (None, 0, sum(sizes) - 1, len(content) - 1):
            wrong, out = bytearray(content), [np.zeros_like(block) for block in blocks]
            if turned is not None:
                wrong[turned] ^= 1
            with fed(bytes(wrong) + b"next", turned or 0) as channel:
                assert receive_planes(channel, [block.data for block in out]) is (turned is None)
                assert channel.receive(4) == b"next"
            assert turned is not None or all(map(np.array_equal, out, blocks))
