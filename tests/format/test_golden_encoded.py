"""Files of version 2 are read for ever, and match FORMAT.md (4.5) byte by byte.

The decoder here is written from FORMAT.md alone: if it and ``kvstore/codec`` disagree, one of them broke the
format.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import xxhash
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.codec.codec import Decoding
from kvstore.format.header import Header, decode_any, decode_as
from kvstore.format.places import Name
from kvstore.root.inspect import Inspector
from kvstore.root.memory import MemoryRoot
from tests.format.make_golden import KEY, EncodedGolden, encoded_goldens
from tests.format.test_golden import FOLDER, number

# Never to be changed: a new version adds files.
SHA256 = {
    "block.v2.bin": "04a0e01df87aedfd073325a97b53e7f0f0b78a41b4051c6f750a192fd7d2a21f",
    "chunk.v2.bin": "b4182451a7e6600f413d8a4881c0badb845567847132cf18c6b915224e50684d",
    "long-both.v2.bin": "7a223dabe30d6333e2d294d60bae2c856347647e1183289b3db8471f0a6abe84",
    "long.v2.bin": "98412624622df9664d1a7a7b4f55ea0d9bc4592fedddf56ff512853e38d5284e",
}
GOLDENS = [pytest.param(golden, id=golden.file) for golden in encoded_goldens()]


def content_of(golden: EncodedGolden) -> bytes:
    return (Path(FOLDER) / golden.file).read_bytes()


def test_the_golden_files_are_those_that_were_committed() -> None:
    assert {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in SHA256} == SHA256


@pytest.mark.parametrize("golden", GOLDENS)
def test_a_golden_file_is_read_and_verified(golden: EncodedGolden) -> None:
    content, plain = content_of(golden), golden.plain
    header = decode_any(content)
    assert (header.incarnation, header.encoding) == (plain.incarnation, golden.wish.encoding)
    assert header.file_bytes == len(content)
    decoding = Decoding(content[: header.header_bytes], header, golden.wish.key)
    sums = decode_as(decoding.plain_header, plain.expected).checksums
    size, payload = plain.expected.section_bytes, bytearray(plain.payload[:0])
    for index in range(plain.expected.section_count):
        offset, stored = decoding.where(index)
        section = bytearray(size)
        decoding.section(index, memoryview(content)[offset : offset + stored], memoryview(section))
        assert xxhash.xxh3_64_intdigest(section) == sums[index]
        payload += section
    assert payload == plain.payload
    root = MemoryRoot()
    root.stage(Name("s"), [memoryview(content)], stamp_ns=0, durable=False)
    assert isinstance(Inspector(root).look(Name("s")), Header)


@pytest.mark.parametrize("golden", [each for each in GOLDENS if not each.values[0].wish.compress])  # type: ignore[union-attr]
def test_what_is_written_today_is_still_the_golden_file(golden: EncodedGolden) -> None:
    assert golden.content() == content_of(golden)  # what zstd makes may differ from one of its versions to the next


@pytest.mark.parametrize("golden", GOLDENS)
def test_a_golden_file_is_what_the_specification_says(golden: EncodedGolden) -> None:
    content, plain = content_of(golden), golden.plain
    size, identity_bytes, count, section_bytes = (
        number(content, at, n) for at, n in ((16, 4), (24, 4), (28, 4), (32, 8))
    )
    assert content[:8] == b"\x93KVCHNK\n" and number(content, 8, 2) == 2 and content[15] == 0
    is_compressed, is_encrypted = bool(content[13] & 1), bool(content[13] & 2)
    assert content[13] in (1, 2, 3)
    padded = -(-identity_bytes // 8) * 8
    inner_bytes = padded + 8 * count
    table = 160 + inner_bytes
    fits = -(-(table + 16 * count + 8) // 4096) * 4096
    assert size in (fits, fits + 4096)
    assert len(content) != plain.expected.file_bytes
    assert number(content, size - 8, 8) == xxhash.xxh3_64_intdigest(content[: size - 8])
    fixed, inner = content[:128], content[128 : 128 + inner_bytes]
    tag, salt = content[128 + inner_bytes : 144 + inner_bytes], content[144 + inner_bytes : 160 + inner_bytes]
    secret = bytes(range(100, 132))
    cipher = AESGCM(hashlib.blake2b(salt, key=secret, digest_size=32, person=b"kvstore.seal.1").digest())
    if is_encrypted:
        assert (
            fixed[120:] == hashlib.blake2b(b"", key=secret, digest_size=8, person=b"kvstore.keyid.1").digest() == KEY.id
        )
        inner = cipher.decrypt((2**32 - 1).to_bytes(12, "little"), inner + tag, fixed)
    else:
        assert fixed[120:] == bytes(8) and tag == salt == bytes(16)
    assert inner[:identity_bytes] == plain.expected.identity
    at, payload = size, b""
    for index in range(count):
        stored_bytes = number(content, table + 16 * index + 8, 8)
        stored = content[at : at + stored_bytes]
        at += stored_bytes
        assert number(content, table + 16 * index, 8) == xxhash.xxh3_64_intdigest(stored)
        if is_encrypted:
            stored = cipher.decrypt(index.to_bytes(12, "little"), stored, fixed)
        if is_compressed and len(stored) != section_bytes:
            planes, itemsize = zstandard.ZstdDecompressor().decompress(stored), content[14]
            each = section_bytes // itemsize
            stored = bytes(planes[plane * each + element] for element in range(each) for plane in range(itemsize))
        assert number(inner, padded + 8 * index, 8) == xxhash.xxh3_64_intdigest(stored)
        payload += stored
    assert at == len(content) and payload == plain.payload
