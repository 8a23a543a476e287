"""Files of version 1 are read for ever, and match FORMAT.md byte by byte.

The decoder here is written from FORMAT.md alone: if it and ``header.py`` disagree, one of them broke the format.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

from kvstore.format.header import Header, decode_as, is_self_consistent
from kvstore.format.places import Name
from kvstore.root.inspect import Inspector
from kvstore.root.memory import MemoryRoot
from tests.format.make_golden import goldens

FOLDER = Path(__file__).parent / "golden"

# Never to be changed: a new version adds files.
SHA256 = {
    "block.v1.bin": "8ab3e2cf90a9176787b5881314707a1f7fd4eb54a4bd265dc11508c6269c505b",
    "chunk.v1.bin": "b33996e51e5b8578cf6af706ae81b2959f3b57c744c35206dc1b087a5592a7a2",
    "long.v1.bin": "d50ab32e040662911ecc687bbbbfcae04d73015483db995a3dc0a6911635a725",
}
VERSION_1 = [golden for golden in goldens() if golden.file in SHA256]

# The namespace of chunk.v1.bin and block.v1.bin, as its record must be written.
RECORD = (
    '{"address":"blake2b-128","attributes":[["rope","yarn"],["tp","0/1"]],"fingerprint":"sha256:0123","layout":'
    '{"chunk_tokens":4,"dtype":"bfloat16","head_dim":4,"kv_heads":1,"layers":2},"name":"golden","tenant":"prüfer"}'
).encode()


def u32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def number(content: bytes, offset: int, size: int) -> int:
    return int.from_bytes(content[offset : offset + size], "little")


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
        root = MemoryRoot()
        root.stage(Name("s"), [memoryview(content)], stamp_ns=0, durable=False)
        assert isinstance(Inspector(root).look(Name("s")), Header)


def test_what_is_written_today_is_still_the_golden_file() -> None:
    for golden in VERSION_1:
        assert golden.content() == (FOLDER / golden.file).read_bytes()


def test_a_golden_file_is_what_the_specification_says() -> None:
    for name in sorted(SHA256):
        content = (FOLDER / name).read_bytes()
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
