"""Files of every version are read for ever, and match FORMAT.md byte by byte.

The decoders here are written from FORMAT.md alone: if they and the code disagree, one of them broke the format.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import xxhash
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.codec.codec import Decoding
from kvstore.format.header import Header, decode_any, decode_as, is_self_consistent
from kvstore.format.places import Name
from kvstore.root.inspect import Inspector
from kvstore.root.memory import MemoryRoot
from tests.format.make_golden import KEY, EncodedGolden, Golden, encoded_goldens, goldens

FOLDER = Path(__file__).parent / "golden"

# Never to be changed: a new version adds files.
SHA256 = {
    "block.v1.bin": "8ab3e2cf90a9176787b5881314707a1f7fd4eb54a4bd265dc11508c6269c505b",
    "chunk.v1.bin": "b33996e51e5b8578cf6af706ae81b2959f3b57c744c35206dc1b087a5592a7a2",
    "long.v1.bin": "d50ab32e040662911ecc687bbbbfcae04d73015483db995a3dc0a6911635a725",
    "block.v2.bin": "04a0e01df87aedfd073325a97b53e7f0f0b78a41b4051c6f750a192fd7d2a21f",
    "chunk.v2.bin": "b4182451a7e6600f413d8a4881c0badb845567847132cf18c6b915224e50684d",
    "long-both.v2.bin": "7a223dabe30d6333e2d294d60bae2c856347647e1183289b3db8471f0a6abe84",
    "long.v2.bin": "98412624622df9664d1a7a7b4f55ea0d9bc4592fedddf56ff512853e38d5284e",
}
VERSION_1 = [golden for golden in goldens() if golden.file in SHA256]
ENCODED = pytest.mark.parametrize("golden", encoded_goldens(), ids=lambda golden: golden.file)

# The namespace of chunk.v1.bin and block.v1.bin, as its record must be written.
RECORD = (
    '{"address":"blake2b-128","attributes":[["rope","yarn"],["tp","0/1"]],"fingerprint":"sha256:0123","layout":'
    '{"chunk_tokens":4,"dtype":"bfloat16","head_dim":4,"kv_heads":1,"layers":2},"name":"golden","tenant":"prüfer"}'
).encode()


def u32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def number(content: bytes, offset: int, size: int) -> int:
    return int.from_bytes(content[offset : offset + size], "little")


def is_whole(content: bytes) -> bool:
    """True if ``fsck`` finds a file whole."""
    root = MemoryRoot()
    root.stage(Name("s"), [memoryview(content)], stamp_ns=0, durable=False)
    return isinstance(Inspector(root).look(Name("s")), Header)


def test_the_golden_files_are_those_that_were_committed() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()}
    assert {name: found.get(name) for name in SHA256} == SHA256


def test_a_golden_file_is_read_and_verified() -> None:
    for golden in VERSION_1:
        content = (FOLDER / golden.file).read_bytes()
        header = decode_as(content, golden.expected)
        assert header.incarnation == golden.incarnation
        assert header.file_bytes == len(content)
        assert content[header.header_bytes :] == golden.payload
        assert is_self_consistent(header)
        assert is_whole(content)


def test_what_is_written_today_is_still_the_golden_file() -> None:
    # What zstd makes may differ from one of its versions to the next.
    encrypted = [golden for golden in encoded_goldens() if not golden.wish.compress]
    every: list[Golden | EncodedGolden] = [*VERSION_1, *encrypted]
    for golden in every:
        assert golden.content() == (FOLDER / golden.file).read_bytes()


def test_a_golden_file_is_what_the_specification_says() -> None:
    for golden in VERSION_1:
        content = (FOLDER / golden.file).read_bytes()
        size, identity_bytes, sections, section_bytes = (
            number(content, 16, 4),
            number(content, 24, 4),
            number(content, 28, 4),
            number(content, 32, 8),
        )
        assert content[0:8] == b"\x93KVCHNK\n"
        assert (number(content, 8, 2), content[10], content[11]) == (1, 1, 1)
        assert content[13:16] == bytes(3) and content[120:128] == bytes(8)
        table = 128 + -(-identity_bytes // 8) * 8
        assert size == -(-(table + 8 * sections + 8) // 4096) * 4096
        assert len(content) == size + sections * section_bytes
        assert not any(content[128 + identity_bytes : table])
        assert not any(content[table + 8 * sections : size - 8])
        assert number(content, size - 8, 8) == xxhash.xxh3_64_intdigest(content[: size - 8], seed=0)
        for index in range(sections):
            start = size + index * section_bytes
            section = content[start : start + section_bytes]
            assert number(content, table + 8 * index, 8) == xxhash.xxh3_64_intdigest(section, seed=0)


def test_the_addresses_of_the_golden_files_are_what_the_specification_says() -> None:
    digest = hashlib.blake2b(RECORD, digest_size=32, person=b"kvstore.ns.1").digest()
    assert json.loads(RECORD)["layout"]["chunk_tokens"] == 4

    def chained(parent: bytes, tokens: bytes) -> bytes:
        return hashlib.blake2b(parent + tokens, digest_size=16, key=digest, person=b"kvstore.chunk.1").digest()

    chunk = (FOLDER / "chunk.v1.bin").read_bytes()
    tokens = u32(0xFFFFFFFF, 6, 7, 8)
    parent = chained(bytes(16), u32(1, 2, 3, 4))
    assert chunk[12] == 0 and number(chunk, 20, 4) == 1
    assert chunk[40:56] == chained(parent, tokens)
    assert chunk[56:72] == parent
    assert chunk[72:104] == digest
    assert chunk[128:144] == tokens

    block = (FOLDER / "block.v1.bin").read_bytes()
    key = bytes(range(32))
    assert block[12] == 1 and number(block, 20, 4) == 0
    assert block[40:56] == hashlib.blake2b(key, digest_size=16, key=digest, person=b"kvstore.block.1").digest()
    assert block[56:72] == bytes(16)
    assert block[128:160] == key


@ENCODED
def test_an_encoded_golden_file_is_read_and_verified(golden: EncodedGolden) -> None:
    content, plain = (FOLDER / golden.file).read_bytes(), golden.plain
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
    assert is_whole(content)


@ENCODED
def test_an_encoded_golden_file_is_what_the_specification_says(golden: EncodedGolden) -> None:
    content, plain = (FOLDER / golden.file).read_bytes(), golden.plain
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
