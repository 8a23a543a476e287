"""The header's codec: it reads back what it wrote, and notices every damage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.core.buffers import token_array
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.format.header import (
    PAGE_BYTES,
    Damage,
    Damaged,
    IdentityKind,
    checksum,
    decode,
    decode_as,
    is_self_consistent,
)
from kvstore.format.keyset import ChunkKeys
from tests.kit.strategies import ChunkFile, chunk_file, chunk_files


@given(chunk_files())
def test_header_is_read_back(file: ChunkFile) -> None:
    header, expected = decode_as(file.content, file.expected), file.expected
    assert (header.kind, header.address, header.parent) == (expected.kind, expected.address, expected.parent)
    assert (header.namespace, header.depth, header.identity) == (expected.namespace, expected.depth, expected.identity)
    assert header.incarnation == file.incarnation
    assert header.section_bytes == expected.section_bytes
    assert header.file_bytes == expected.file_bytes == len(file.content)
    assert header.descent == expected.descent
    assert header.header_bytes % PAGE_BYTES == 0
    size = header.section_bytes
    payload = file.content[header.header_bytes :]
    assert list(header.checksums) == [
        checksum(payload[n * size : (n + 1) * size]) for n in range(expected.section_count)
    ]
    assert is_self_consistent(header)


@given(chunk_files(), st.data())
def test_flipped_or_cut_header_is_damage(file: ChunkFile, data: st.DataObject) -> None:
    header = bytearray(file.content[: file.expected.header_bytes])
    position = data.draw(st.integers(0, len(header) * 8 - 1))
    cut = data.draw(st.integers(0, len(header) - 1))
    for content in (bytes(header[:cut]), bytes(header[:cut]) + bytes(len(header) - cut)):
        if content != bytes(header):
            with pytest.raises(Damaged):
                decode(content)
    header[position // 8] ^= 1 << position % 8
    with pytest.raises(Damaged):
        decode(header)


def test_cut_header_of_several_pages_is_damage() -> None:
    layout = Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=3000)
    expected = ChunkKeys.of(Namespace.of("long", layout), token_array(range(3000))).expected(0)
    file = chunk_file(expected, bytes(16), bytes(6000))
    assert expected.header_bytes == 3 * PAGE_BYTES
    for size in (PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES - 1):
        with pytest.raises(Damaged) as caught:
            decode(file.content[:size])
        assert caught.value.damage is Damage.GEOMETRY
    assert decode(file.content[: 3 * PAGE_BYTES]).depth == 0


@given(st.binary(max_size=9000))
@example(b"\x93KVCHNK\n" + b"\xff" * 9000)
@example(b"\x93KVCHNK\n\x01\x00\x01\x01\x00" + b"\xff" * 9000)
@example(b"\x93KVCHNK\n\x01\x00\x01\x01\x01\0\0\0\x00\x10\0\0" + b"\x00" * 4078)
def test_random_bytes_are_damage(content: bytes) -> None:
    with pytest.raises(Damaged):
        decode(content)


@given(chunk_files())
def test_every_field_of_the_identity_counts(file: ChunkFile) -> None:
    wanted = file.expected
    flipped = Address(bytes([wanted.address[0] ^ 1]) + wanted.address[1:])
    others = [
        replace(wanted, kind=IdentityKind.BLOCK if wanted.kind is IdentityKind.TOKENS else IdentityKind.TOKENS),
        replace(wanted, address=flipped),
        replace(wanted, parent=flipped),
        replace(wanted, namespace=NamespaceDigest(flipped + wanted.namespace[16:])),
        replace(wanted, depth=wanted.depth + 1),
        replace(wanted, identity=bytes([wanted.identity[0] ^ 1]) + wanted.identity[1:]),
    ]
    for other in others:
        with pytest.raises(Damaged) as caught:
            decode_as(file.content, other)
        assert caught.value.damage is Damage.IDENTITY
    for other in (
        replace(wanted, section_bytes=wanted.section_bytes + 1),
        replace(wanted, section_count=wanted.section_count + 1),
    ):
        with pytest.raises(Damaged) as caught:
            decode_as(file.content, other)
        assert caught.value.damage is Damage.GEOMETRY


def test_each_reason_is_distinguished() -> None:
    for offset, value, damage in (
        (0, b"\x00", Damage.MAGIC),
        (8, b"\x02", Damage.VERSION),
        (9, b"\x01", Damage.VERSION),
        (10, b"\x02", Damage.ALGORITHM),
        (11, b"\x02", Damage.ALGORITHM),
        (12, b"\x02", Damage.ALGORITHM),
        (16, b"\x01", Damage.GEOMETRY),
        (16, b"\xff\xff\xff\xff", Damage.GEOMETRY),
        (24, b"\xff\xff\xff\xff", Damage.GEOMETRY),
        (28, b"\xff\xff\xff\xff", Damage.GEOMETRY),
        (40, b"\x00\x00\x00", Damage.HEADER_CHECKSUM),
        (4088, b"\x00\x00", Damage.HEADER_CHECKSUM),
    ):
        layout = Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=2)
        expected = ChunkKeys.of(Namespace.of("reasons", layout), token_array([1, 2])).expected(0)
        content = bytearray(chunk_file(expected, bytes(16), bytes(4)).content)
        content[offset : offset + len(value)] = value
        with pytest.raises(Damaged) as caught:
            decode(content)
        assert caught.value.damage is damage
