"""Bytes over a bulk connection are compared with their checksums, whichever bit is flipped, and with its limits."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvstore.address import Chain
from kvstore.buffers import Pieces
from kvstore.client.bulk.given import GivenFiles
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.viewing import Views, view_given
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damaged, expected_chunk
from kvstore.namespace import Namespace
from kvstore.node.lanes import Deadline
from kvstore.node.wanted import keyed
from kvstore.node.write import Write
from kvstore.sections import Planes
from kvstore.sources import RandomIds, SystemClock
from kvstore.wire.bulk.channel import Channel, LinkBroken
from kvstore.wire.bulk.frames import Kind, decode_head, decode_request, encode_arena, encode_head, encode_span
from kvstore.wire.bulk.sums import block_sums, plane_sums
from kvstore.wire.images import fill_verified
from kvstore.wire.statuses import BrokenTransfer
from kvstore.worker.admission import Buffers, BytesInFlight, Gate
from kvstore.worker.bulk.arriving import Arrived, Arriving
from kvstore.worker.bulk.cargo import Cargo
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.calls import Calls
from kvstore.writes import WriteMode
from tests.kit.images import chain_of, made
from tests.kit.stores import SMALL, kv_of
from tests.kit.transports import linked, shared_memory
from tests.kit.workers import WAIT_S

COUNT = 3
CHAIN = chain_of(SMALL, COUNT)


def test_i1_a_run_with_a_bit_turned_in_any_plane_is_not_stored() -> None:
    for plane in range(2 * SMALL.layers):
        content = bytearray(kv_of(SMALL, CHAIN.tokens).tobytes())
        planes = Planes(np.frombuffer(content, np.uint8).reshape(SMALL.layers, 2, -1), SMALL.section_bytes, 0)
        cargo, sums = Cargo(CHAIN, 0, COUNT), plane_sums(planes, 0, COUNT)
        cargo.sections(0, COUNT, memoryview(content), sums)
        content[plane * COUNT * SMALL.section_bytes + 5] ^= 1
        with pytest.raises(BrokenTransfer):
            cargo.sections(0, COUNT, memoryview(content), sums)


def test_i1_blocks_with_a_bit_turned_in_any_are_not_stored() -> None:
    for block in range(COUNT):
        namespace, sizes = Namespace.of("m", SMALL), [10, 200, 3]
        keys = [bytes([at]) * 16 for at in range(COUNT)]
        wanted = keyed(namespace, keys, sizes)
        content = bytearray(range(213))
        ends = np.cumsum([0, *sizes]).tolist()
        buffers = [memoryview(content)[start:stop] for start, stop in pairwise(ends)]
        cargo, sums = Cargo(wanted, 0, COUNT), block_sums(buffers)
        cargo.sections(0, COUNT, memoryview(content), sums)
        content[ends[block]] ^= 1
        with pytest.raises(BrokenTransfer):
            cargo.sections(0, COUNT, memoryview(content), sums)


def given(content: bytes) -> Callable[[Pieces], int]:
    """Fills pieces with the arriving bytes, 1,000 at a time."""
    at = 0

    def fill(pieces: Pieces) -> int:
        nonlocal at
        piece = pieces[0][:1000]
        piece[:] = content[at : at + len(piece)]
        at += len(piece)
        return len(piece)

    return fill


def received(chain: Chain, index: int, content: bytes) -> bytes:
    sections = [memoryview(bytearray(SMALL.section_bytes)) for _ in range(SMALL.section_count)]
    fill_verified(given(content), expected_chunk(chain, index), sections)
    return b"".join(sections)


def test_i1_a_file_with_a_bit_turned_is_not_received() -> None:
    for place in (60, 4090, 4096, 4096 + SMALL.section_bytes, -1):
        kv = kv_of(SMALL, CHAIN.tokens)
        content = bytearray(made(CHAIN, kv)[1])
        assert received(CHAIN, 1, bytes(content)) == bytes(content[4096:])
        content[place] ^= 1
        with pytest.raises(Damaged):
            received(CHAIN, 1, bytes(content))


def test_a_file_that_is_too_short_to_be_mapped_is_not_viewed(tmp_path: Path) -> None:
    """What was given before it is, and each file that was given has an answer."""
    files = []
    for index, image in enumerate(made(CHAIN, kv_of(SMALL, CHAIN.tokens))):
        path = tmp_path / str(index)
        path.write_bytes(bytes(image)[: len(image) - (index == 1) * SMALL.chunk_bytes])
        files.append(os.open(path, os.O_RDONLY))
    ours, theirs = socket.socketpair()
    clock, views = SystemClock(), Views(SMALL, COUNT)
    link, lanes = linked(Channel(ours, 1)), FileLanes(clock)
    done = view_given(link, CHAIN, GivenFiles(0, files), views, lanes, Deadline(clock, WAIT_S))
    assert list(done) == [1, 0, 0]
    assert len(views.leading(1)) == 1
    lanes.close()
    link.close()
    theirs.close()


def test_i1_another_chunks_file_is_not_received() -> None:
    with pytest.raises(Damaged):
        received(CHAIN, 1, bytes(made(CHAIN, kv_of(SMALL, CHAIN.tokens))[2]))


def test_a_request_without_a_timeout_is_refused() -> None:
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidRequest, match="more than 0 seconds"):
            decode_request(struct.pack("<dB7x", timeout_s, 0) + b"message")


def test_an_arena_over_the_limit_is_refused() -> None:
    ours, theirs = (Channel(each, 10.0) for each in socket.socketpair())
    size_bytes = 1 << 20
    fd = shared_memory(size_bytes, fcntl.F_SEAL_SHRINK)
    connection = Connection(ours)
    try:
        for most, fits in ((size_bytes - 1, False), (size_bytes, True)):
            theirs.send(Kind.ARENA, 0, [encode_arena(size_bytes)], [fd])
            ours.receive_frame(Kind.ARENA)
            if fits:
                connection.adopt_arena(size_bytes, most)
            else:
                with pytest.raises(InvalidRequest, match="expected 1 to"):
                    connection.adopt_arena(size_bytes, most)
            assert connection.has_arena is fits
    finally:
        os.close(fd)
        connection.close()
        theirs.close()


def test_a_head_of_another_protocol_is_refused() -> None:
    head = bytearray(encode_head(Kind.GET, 1, 8))
    assert decode_head(head).length == 8
    head[0] ^= 1
    with pytest.raises(InvalidRequest, match="not a frame"):
        decode_head(head)


@contextmanager
def runs_of(span: tuple[int, int], more_bytes: int = 0) -> Iterator[Iterator[Arrived]]:
    """The runs of a put of three chunks; one run has arrived with this span, and with this many extra bytes."""
    ours, theirs = (Channel(each, 10.0) for each in socket.socketpair())
    calls = Calls(Gate(1), RandomIds())
    arriving = Arriving(BytesInFlight(1 << 20), calls, Buffers(1 << 20), 1 << 20)
    keys = [bytes([at]) * 16 for at in range(COUNT)]
    cargo = Cargo(keyed(Namespace.of("m", SMALL), keys, [10] * COUNT), 0, COUNT)
    theirs.send(Kind.CHUNKS, 1, [encode_span(*span), bytes(18 * span[1] + more_bytes)])
    with ExitStack() as reserved:
        write = cast(Write, SimpleNamespace(mode=WriteMode.UNCACHED))
        yield arriving.runs(Connection(ours), cargo, write, reserved)
    ours.close()
    theirs.close()


def test_runs_come_in_order_and_in_their_bounds() -> None:
    with runs_of((0, 2)) as runs:
        assert next(runs).count == 2
    for span in ((1, 1), (0, 0), (0, COUNT + 1), (COUNT, 1)):
        with runs_of(span) as runs, pytest.raises(LinkBroken, match="expected chunks from 0 on"):
            next(runs)


def test_a_run_has_the_length_that_it_says() -> None:
    for more_bytes in (1, 8, -8):
        with runs_of((0, 2), more_bytes) as runs, pytest.raises(LinkBroken, match="not their size, or too large a run"):
            next(runs)


def test_a_frame_brings_no_more_files_than_it_may() -> None:
    one, other = socket.socketpair()
    ours, theirs = Channel(one, 10.0, files_max=1), Channel(other, 10.0)
    try:
        with open(os.devnull, "rb") as file:
            theirs.send(Kind.ARENA, 0, [encode_arena(1)], [file.fileno()])
            ours.receive_frame(Kind.ARENA)
            for fd in ours.take_files(1):
                os.close(fd)
            theirs.send(Kind.ARENA, 0, [encode_arena(1)], [file.fileno()] * 2)
        with pytest.raises(LinkBroken, match="more files came"):
            ours.receive_frame(Kind.ARENA)
    finally:
        ours.close()
        theirs.close()
