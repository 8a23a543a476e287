"""The descent of a block in its file: a claim kept as it was given, at which no reader of the block looks."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.image import make_images, verify_images
from kvstore.core.address import block_addresses
from kvstore.core.buffers import BlockBuffers
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest
from kvstore.format.header import DESCENT_BYTES_MAX, PAGE_BYTES, Descent, checksum, decode, decode_as, expected_block
from kvstore.format.keyset import BlockKeys
from kvstore.native import library as native
from tests.kit.stores import TINY
from tests.kit.strategies import chunk_file, token_ids

KEY = bytes(range(64))


class _Zeros:
    """Ids that are all zero, so that images can be compared."""

    def fresh(self) -> bytes:
        return bytes(16)


@st.composite
def descents(draw: st.DrawFn) -> Descent:
    """Any descent that may be."""
    depth = draw(st.integers(0, 2**32 - 1))
    return Descent(
        draw(st.lists(token_ids, min_size=1, max_size=40)),
        depth,
        draw(st.binary(min_size=16, max_size=64)) if depth else b"",
        draw(st.integers(8, 64)),
        draw(st.integers(0, 255)),
        draw(st.binary(max_size=50)),
    )


def fields(descent: Descent) -> tuple[object, ...]:
    """Everything that a descent says."""
    found = (descent.depth, descent.parent, descent.hash_bytes, descent.group)
    return (list(descent.tokens), *found, descent.extra)


@given(descents())
def test_descent_is_read_back(descent: Descent) -> None:
    found = Descent.unpack(descent.pack())
    assert found is not None and fields(found) == fields(descent)
    assert len(descent.pack()) == descent.packed_bytes


@given(descents(), st.data())
def test_changed_bytes_are_another_descent_or_none(descent: Descent, data: st.DataObject) -> None:
    packed = bytearray(descent.pack())
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(packed[: data.draw(st.integers(0, len(packed)))])
    for content in (bytes(packed), cut, cut + b"\0"):
        found = Descent.unpack(content)
        assert found is None or found.pack() == content


WRONG: list[dict[str, Any]] = [
    {"tokens": []},
    {"depth": 1},
    {"parent": b"p" * 16},
    {"depth": 1, "parent": b"p" * 15},
    {"depth": 1, "parent": b"p" * 65},
    {"hash_bytes": 7},
    {"hash_bytes": 65},
    {"group": 256},
    {"extra": bytes(1025)},
    {"tokens": range(900)},
]


def test_descent_out_of_range_is_refused() -> None:
    for wrong in WRONG:
        given_: dict[str, object] = {"tokens": [1, 2], "depth": 0}
        with pytest.raises(InvalidRequest):
            Descent(**{**given_, **wrong})


def test_bytes_are_those_of_the_specification() -> None:
    extra = b'{"lora_name":"sql"}'
    said = Descent([1, 0xFFFFFFFF], 5, b"p" * 16, 32, 7, extra).pack()
    assert said == (
        b"\x20\x07\0\0\x05\0\0\0" + b"\x02\0\0\0\x10\0\x13\0" + b"p" * 16 + b"\x01\0\0\0\xff\xff\xff\xff" + extra
    )
    content = chunk_file(expected_block(Namespace.of("m", TINY), KEY[:33], 5, said), bytes(16), b"12345").content
    table = 128 + 40
    assert content[table + 8 : table + 12] == len(said).to_bytes(4, "little")
    assert content[table + 12 : PAGE_BYTES - 8] == said.ljust(PAGE_BYTES - 8 - table - 12, b"\0")


def test_descent_never_changes_size_or_identity() -> None:
    space = Namespace.of("m", TINY)
    for said in (b"anything", bytes([7]) * DESCENT_BYTES_MAX):
        file = chunk_file(expected_block(space, KEY, 5, said), bytes(16), b"12345")
        expected = expected_block(space, KEY, 5)
        assert expected.file_bytes == len(file.content) and expected.header_bytes == PAGE_BYTES
        assert decode_as(file.content, expected).descent == said


def test_impossible_size_is_no_descent() -> None:
    for size in (DESCENT_BYTES_MAX + 1, 1 << 16, (1 << 32) - 1):
        space = Namespace.of("m", TINY)
        header = bytearray(
            chunk_file(expected_block(space, KEY, 5, b"anything"), bytes(16), b"12345").content[:PAGE_BYTES]
        )
        at = header.index(b"anything") - 4
        struct.pack_into("<I", header, at, size)
        struct.pack_into("<Q", header, PAGE_BYTES - 8, checksum(memoryview(header)[: PAGE_BYTES - 8]))
        assert decode(header).descent == b""


@pytest.mark.skipif(not native.is_available(), reason="the native library was not built, or is turned off")
def test_native_code_writes_the_same_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    space, keys = Namespace.of("m", TINY), [bytes([at]) * (16 + at) for at in range(4)]
    said = [b"", b"a", bytes(range(256)) * 14, b"last"]
    wanted = BlockKeys(space, keys, block_addresses(space, keys), [5] * 4, (), said)
    source = BlockBuffers([memoryview(bytes([at]) * 5) for at in range(4)])

    def made() -> list[bytes]:
        images = [memoryview(bytearray(wanted.image_bytes(at))) for at in range(4)]
        make_images(wanted, range(4), source, images, _Zeros())
        assert verify_images(wanted, range(4), images).all()
        return [bytes(image) for image in images]

    natively = made()
    monkeypatch.setattr(native, "library", native.PurePython)
    assert made() == natively
    assert [decode(image).descent for image in natively] == said
