"""Writes the golden files of the current format version: ``python -m tests.format.make_golden FOLDER``.

For a new version only, into a new folder: what is committed is never written again (``FORMAT.md``, section 6).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.codec.codec import Key, Wish, encode_chunk
from kvstore.core.buffers import token_array
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.format.header import VERSION, Expected, Incarnation, checksum, encode, expected_block
from kvstore.format.keyset import ChunkKeys


@dataclass(frozen=True)
class Golden:
    """One file, and everything it was written from."""

    file: str
    expected: Expected
    incarnation: Incarnation
    payload: bytes

    def content(self) -> bytes:
        size = self.expected.section_bytes
        sums = [checksum(self.payload[start : start + size]) for start in range(0, len(self.payload), size)]
        return bytes(encode(self.expected, self.incarnation, sums)) + self.payload


@dataclass(frozen=True)
class EncodedGolden:
    """A golden file of version 2."""

    file: str
    plain: Golden
    wish: Wish
    salt: bytes

    def content(self) -> bytes:
        payload, size = memoryview(self.plain.payload), self.plain.expected.section_bytes
        sections = [payload[start : start + size] for start in range(0, len(payload), size)]
        return b"".join(encode_chunk(self.plain.expected, self.plain.incarnation, sections, self.wish, self.salt))


KEY = Key("2026-11", bytes(range(100, 132)))

SMALL = Namespace.of(
    "golden",
    Layout(layers=2, kv_heads=1, head_dim=4, dtype="bfloat16", chunk_tokens=4),
    fingerprint="sha256:0123",
    tenant="prüfer",
    attributes={"rope": "yarn", "tp": "0/1"},
)
LONG = Namespace.of("golden-long", Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=1500))


def goldens() -> list[Golden]:
    """The second chunk of a chain, a block, and a chunk whose header takes two pages."""
    chunk = ChunkKeys.of(SMALL, token_array([1, 2, 3, 4, 0xFFFFFFFF, 6, 7, 8, 9])).expected(1)
    block = expected_block(SMALL, bytes(range(32)), 100)
    long = ChunkKeys.of(LONG, token_array(np.arange(1500) * 77)).expected(0)
    return [
        Golden(f"chunk.v{VERSION}.bin", chunk, Incarnation(bytes(range(16))), bytes(range(128))),
        Golden(f"block.v{VERSION}.bin", block, Incarnation(bytes(range(16, 32))), bytes(range(100, 200))),
        Golden(f"long.v{VERSION}.bin", long, Incarnation(bytes(range(32, 48))), bytes(i % 251 for i in range(3000))),
    ]


def encoded_goldens() -> list[EncodedGolden]:
    """The chunk and the block encrypted, the long one compressed, and that one both."""
    chunk, block, long = goldens()
    salt = bytes(range(200, 216))
    return [
        EncodedGolden("chunk.v2.bin", chunk, Wish(key=KEY), salt),
        EncodedGolden("block.v2.bin", block, Wish(key=KEY), salt),
        EncodedGolden("long.v2.bin", long, Wish(compress=True), b""),
        EncodedGolden("long-both.v2.bin", long, Wish(compress=True, key=KEY), salt),
    ]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    every: list[Golden | EncodedGolden] = [*goldens(), *encoded_goldens()]
    for golden in every:
        with (folder / golden.file).open("xb") as file:
            file.write(golden.content())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
