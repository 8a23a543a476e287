"""Encoded files as bytes: they decode to what was encoded, and to nothing else."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec.codec import PLAIN, Decoding, Key, Wish, decode_header, encode_chunk
from kvstore.format.header import (
    Damage,
    Damaged,
    Encoding,
    Header,
    checksum,
    decode,
    decode_any,
    decode_as,
    decode_encoded,
)
from tests.kit.keyed import secret
from tests.kit.strategies import ChunkFile, chunk_file, chunk_files

KEY, OTHER = Key("a", secret("a")), Key("b", secret("b"))
wishes = st.sampled_from([Wish(True), Wish(key=KEY), Wish(True, KEY)])
salts = st.binary(min_size=16, max_size=16)


def sections_of(file: ChunkFile) -> list[memoryview]:
    size = file.expected.section_bytes
    return [memoryview(file.payload)[at * size : (at + 1) * size] for at in range(file.expected.section_count)]


def encoded(file: ChunkFile, wish: Wish, salt: bytes) -> bytearray:
    return bytearray(b"".join(encode_chunk(file.expected, file.incarnation, sections_of(file), wish, salt)))


def decoded(file: ChunkFile, content: bytes | bytearray, key: Key | None) -> bytes:
    """Decodes as a reader does that expects the chunk of ``file``. Raises Damaged."""
    header = decode_header(content, file.expected)
    if header.file_bytes != len(content):
        raise Damaged(Damage.SIZE)
    decoding = Decoding(content, header, key if Encoding.ENCRYPTED in header.encoding else None)
    plain = decode_as(decoding.plain_header, file.expected)
    payload = bytearray(file.expected.payload_bytes)
    for index, sum_ in enumerate(plain.checksums):
        section = memoryview(payload)[index * plain.section_bytes : (index + 1) * plain.section_bytes]
        offset, size = decoding.where(index)
        decoding.section(index, memoryview(content)[offset : offset + size], section)
        if checksum(section) != sum_:
            raise Damaged(Damage.SECTION_CHECKSUM)
    return decoding.plain_header + bytes(payload)


@settings(max_examples=25)
@given(chunk_files(), wishes, salts)
def test_decoding_gives_the_very_file_of_version_1(file: ChunkFile, wish: Wish, salt: bytes) -> None:
    content = encoded(file, wish, salt)
    shown = b"" if wish.key else file.expected.descent
    plain = chunk_file(replace(file.expected, descent=shown), file.incarnation, file.payload)
    assert decoded(file, content, KEY) == plain.content
    assert decode_any(content).descent == shown, "the tokens of an encrypted block are for those with its key"
    assert len(content) != len(file.content), "its size alone tells the version"
    header = decode_any(content)
    assert (header.encoding, header.file_bytes) == (wish.encoding, len(content))
    with pytest.raises(Damaged):
        decode(content)
    assert wish == PLAIN or decode_any(file.content).encoding is Encoding.PLAIN


@settings(max_examples=25)
@given(chunk_files(), wishes, salts, st.data())
def test_any_flipped_bit_is_found(file: ChunkFile, wish: Wish, salt: bytes, data: st.DataObject) -> None:
    content = encoded(file, wish, salt)
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged):
        decoded(file, content, KEY)


def _sealed_anew(content: bytearray) -> bytearray:
    """Returns the file with a new checksum of its header, as somebody without a key would write it."""
    size = int.from_bytes(content[16:20], "little")
    content[size - 8 : size] = checksum(memoryview(content)[: size - 8]).to_bytes(8, "little")
    return content


def _summed_anew(content: bytearray, header: Header, inner: int) -> bytearray:
    """Returns the file with new checksums for its stored sections."""
    table, offset = 160 + inner, header.header_bytes
    for index, stored in enumerate(header.stored):
        content[table + 16 * index : table + 16 * index + 8] = checksum(
            memoryview(content)[offset : offset + stored.size_bytes]
        ).to_bytes(8, "little")
        offset += stored.size_bytes
    return content


@settings(max_examples=25)
@given(chunk_files(), salts, st.data())
def test_what_somebody_changes_who_has_no_key_is_found(file: ChunkFile, salt: bytes, data: st.DataObject) -> None:
    content = encoded(file, Wish(key=KEY), salt)
    header = decode_encoded(content)
    identity, count = len(file.expected.identity), file.expected.section_count
    inner = -(-identity // 8) * 8 + 8 * count
    # Everything but padding: the chunk's names, the incarnation, the sealed part, the salt, the bytes themselves.
    at = data.draw(
        st.one_of(
            st.integers(20, 119), st.integers(128, 128 + inner + 31), st.integers(header.header_bytes, len(content) - 1)
        )
    )
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged):
        decoded(file, _sealed_anew(_summed_anew(content, header, inner)), KEY)


@settings(max_examples=25)
@given(chunk_files(), salts)
def test_a_section_moved_to_another_place_is_found(file: ChunkFile, salt: bytes) -> None:
    if file.expected.section_count < 2:
        return
    content = encoded(file, Wish(key=KEY), salt)
    header = decode_encoded(content)
    size, start = header.stored[0].size_bytes, header.header_bytes
    first, second = bytes(content[start : start + size]), bytes(content[start + size : start + 2 * size])
    content[start : start + 2 * size] = second + first
    table = 160 + -(-len(file.expected.identity) // 8) * 8 + 8 * file.expected.section_count
    entries = bytes(content[table : table + 32])
    content[table : table + 32] = entries[16:] + entries[:16]
    with pytest.raises(Damaged) as caught:
        decoded(file, _sealed_anew(content), KEY)
    assert caught.value.damage is Damage.SEAL


@settings(max_examples=25)
@given(chunk_files(), salts)
def test_a_file_under_another_name_or_namespace_is_found(file: ChunkFile, salt: bytes) -> None:
    content = encoded(file, Wish(key=KEY), salt)
    for start, other in (
        (40, replace(file.expected, address=type(file.expected.address)(bytes(16)))),
        (72, replace(file.expected, namespace=type(file.expected.namespace)(bytes(32)))),
    ):
        moved = replace(file, expected=other)
        for wish in (Wish(key=KEY), Wish(compress=True)):
            with pytest.raises(Damaged) as caught:
                decode_header(encoded(file, wish, salt), other)
            assert caught.value.damage is Damage.IDENTITY, "no key is needed to see it"
        forged = bytearray(content)  # and said so in its header
        forged[start : start + 16] = bytes(16)
        if start == 72:
            forged[start : start + 32] = bytes(32)
        with pytest.raises(Damaged) as caught:
            decoded(moved, _sealed_anew(forged), KEY)
        assert caught.value.damage is Damage.SEAL


@settings(max_examples=25)
@given(chunk_files(), salts)
def test_another_key_opens_nothing(file: ChunkFile, salt: bytes) -> None:
    with pytest.raises(Damaged) as caught:
        decoded(file, encoded(file, Wish(True, KEY), salt), OTHER)
    assert caught.value.damage is Damage.SEAL


def test_a_frame_that_claims_more_than_a_section_takes_no_memory() -> None:
    import zstandard

    from kvstore.codec.codec import stretch

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(Damaged):
            stretch(bomb, memoryview(bytearray(1000)), 1)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
