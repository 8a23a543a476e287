"""Images of chunks in memory, and the ways in which one can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.codec.image import make_images
from kvstore.core.buffers import planes_of
from kvstore.core.namespace import Namespace
from kvstore.format.header import Expected, Incarnation, checksum, encode
from kvstore.format.keyset import ChunkKeys
from tests.kit.fake_meta import CountingIds
from tests.kit.stores import resealed

Spoil = Callable[[bytes], bytes]


def flipped(at: int) -> Spoil:
    return lambda whole: whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]


DAMAGES: dict[str, Spoil] = {
    **{f"byte {at}": flipped(at) for at in (0, 8, 10, 11, 12, 13, 16, 20, 24, 28, 32, 40, 56, 72, 104, 120, 128, 144)},
    **{f"byte {at}": flipped(at) for at in (300, 4087, 4088, 4095, 4096, 4111, 4112, 4159, -1)},
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "one byte short": lambda whole: whole[:-1],
    "one byte long": lambda whole: whole + b"\0",
    "zeros": lambda whole: bytes(len(whole)),
    "other version": lambda whole: resealed(whole, 8, struct.pack("<H", 2)),
    "other kind": lambda whole: resealed(whole, 12, b"\x01"),
    "other depth": lambda whole: resealed(whole, 20, struct.pack("<I", 9)),
    "other tokens": lambda whole: resealed(whole, 128, struct.pack("<I", 77)),
    "other parent": lambda whole: resealed(whole, 56, b"p" * 16),
    "other namespace": lambda whole: resealed(whole, 72, b"n" * 32),
    "other sections": lambda whole: resealed(whole, 28, struct.pack("<IQ", 8, 8)),
    "bits a reader ignores": lambda whole: resealed(whole, 120, b"\x01"),
}


def encoded(expected: Expected, payload: bytes, incarnation: bytes = bytes(16)) -> bytes:
    """A whole chunk file with this payload."""
    size = expected.section_bytes
    sums = [checksum(payload[at * size : (at + 1) * size]) for at in range(expected.section_count)]
    return bytes(encode(expected, Incarnation(incarnation), sums)) + payload


def chain_of(layout: Layout, chunks: int) -> ChunkKeys:
    return ChunkKeys.of(Namespace.of("m", layout), np.arange(chunks * layout.chunk_tokens, dtype=np.uint32))


def room_for(chain: ChunkKeys) -> list[memoryview]:
    """Memory for the image of each chunk, in one piece, with the pages between them that an arena has."""
    size = chain.image_bytes(0)
    stride = -(-size // 4096) * 4096
    memory = memoryview(bytearray(stride * len(chain)))
    return [memory[at * stride : at * stride + size] for at in range(len(chain))]


def made(chain: ChunkKeys, kv: npt.NDArray[np.generic]) -> list[memoryview]:
    images = room_for(chain)
    make_images(chain, range(len(chain)), planes_of(kv, chain.namespace.layout), images, CountingIds())
    return images
