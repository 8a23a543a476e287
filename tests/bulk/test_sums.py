"""Bytes over a bulk connection are compared with their checksums, whichever bit is flipped, and with its limits."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable

import pytest

from kvstore.core.buffers import Pieces
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damaged
from kvstore.format.keyset import ChunkKeys
from kvstore.transport.channel import Channel, LinkBroken
from kvstore.transport.frames import FrameKind, decode_request, encode_arena
from kvstore.transport.images import fill_verified
from kvstore.worker.data_put import Connection
from tests.kit.images import chain_of, made
from tests.kit.stores import SMALL, kv_of
from tests.kit.transports import shared_memory

COUNT = 3
CHAIN = chain_of(SMALL, COUNT)


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


def received(chain: ChunkKeys, index: int, content: bytes) -> bytes:
    sections = [memoryview(bytearray(SMALL.section_bytes)) for _ in range(SMALL.section_count)]
    fill_verified(given(content), chain.expected(index), sections)
    return b"".join(sections)


def test_i1_a_file_with_a_bit_turned_is_not_received() -> None:
    for place in (60, 4090, 4096, 4096 + SMALL.section_bytes, -1):
        kv = kv_of(SMALL, CHAIN.tokens)
        content = bytearray(made(CHAIN, kv)[1])
        assert received(CHAIN, 1, bytes(content)) == bytes(content[4096:])
        content[place] ^= 1
        with pytest.raises(Damaged):
            received(CHAIN, 1, bytes(content))


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
            theirs.send(FrameKind.ARENA, 0, [encode_arena(size_bytes)], [fd])
            ours.receive_frame(FrameKind.ARENA)
            if fits:
                connection.adopt_arena(size_bytes, most)
                assert len(connection.placed(0, size_bytes)) == size_bytes
            else:
                with pytest.raises(InvalidRequest, match="expected 1 to"):
                    connection.adopt_arena(size_bytes, most)
    finally:
        os.close(fd)
        connection.close()
        theirs.close()


def test_a_frame_brings_no_more_files_than_it_may() -> None:
    one, other = socket.socketpair()
    ours, theirs = Channel(one, 10.0, files_max=1), Channel(other, 10.0)
    try:
        with open(os.devnull, "rb") as file:
            theirs.send(FrameKind.ARENA, 0, [encode_arena(1)], [file.fileno()])
            ours.receive_frame(FrameKind.ARENA)
            for fd in ours.take_files(1):
                os.close(fd)
            theirs.send(FrameKind.ARENA, 0, [encode_arena(1)], [file.fileno()] * 2)
        with pytest.raises(LinkBroken, match="more files came"):
            ours.receive_frame(FrameKind.ARENA)
    finally:
        ours.close()
        theirs.close()
