"""Addresses: chained, keyed with the namespace, and cut at chunk boundaries only."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.address import NO_PARENT, Address, block_address, chunk_address
from kvstore.errors import InvalidRequest
from kvstore.keyset import ChunkKeys
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.tokens import TOKEN_ID_MAX, TOKENS_MAX, TokenArray, token_array
from tests.kit.strategies import namespaces, token_ids


@given(namespaces, st.lists(token_ids, max_size=40))
def test_addresses_are_those_of_the_definition(namespace: Namespace, tokens: list[int]) -> None:
    """FORMAT.md, section 4.1, which files are checked with."""
    size, parent = namespace.layout.chunk_tokens, bytes(16)
    chain = ChunkKeys.of(namespace, token_array(tokens))
    assert len(chain) == len(tokens) // size
    for index, address in enumerate(chain.addresses):
        packed = struct.pack(f"<{size}I", *tokens[index * size : (index + 1) * size])
        assert chunk_address(namespace.digest, Address(parent), packed) == address
        assert bytes(chain.chunk_tokens(index)) == packed
        parent = blake2b(parent + packed, digest_size=16, key=namespace.digest, person=b"kvstore.chunk.1").digest()
        assert parent == address


@given(namespaces, st.lists(token_ids, max_size=40), st.lists(token_ids, max_size=40))
def test_a_longer_prompt_begins_with_the_addresses_of_its_prefix(
    namespace: Namespace, tokens: list[int], more: list[int]
) -> None:
    short, long = ChunkKeys.of(namespace, token_array(tokens)), ChunkKeys.of(namespace, token_array(tokens + more))
    assert long.addresses[: len(short)] == short.addresses
    assert len(short) == len(tokens) // namespace.layout.chunk_tokens
    assert [short.parent(n) for n in range(len(short))] == [NO_PARENT, *short.addresses][: len(short)]


@given(namespaces, st.lists(token_ids, min_size=1, max_size=40), st.data())
def test_a_changed_token_changes_its_chunk_and_all_after_it_and_none_before(
    namespace: Namespace, tokens: list[int], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[position] ^= 1 << data.draw(st.integers(0, 31))
    a, b = ChunkKeys.of(namespace, token_array(tokens)), ChunkKeys.of(namespace, token_array(other))
    first = position // namespace.layout.chunk_tokens
    assert a.addresses[:first] == b.addresses[:first]
    assert not set(a.addresses[first:]) & set(b.addresses[first:])


@given(namespaces, namespaces, st.lists(token_ids, min_size=7, max_size=21), st.binary(min_size=16, max_size=64))
def test_two_namespaces_share_no_address(one: Namespace, other: Namespace, tokens: list[int], key: bytes) -> None:
    if one.digest == other.digest:
        return
    array = token_array(tokens)
    assert not set(ChunkKeys.of(one, array).addresses) & set(ChunkKeys.of(other, array).addresses)
    assert block_address(one, key) != block_address(other, key)


CHANGES: list[dict[str, object]] = [
    {"name": "m2"},
    {"fingerprint": "f2"},
    {"tenant": "t2"},
    {"attributes": {"tp": "1/2"}},
    {"attributes": {}},
    {"layout": Layout(layers=2, kv_heads=1, head_dim=4, chunk_tokens=2, dtype="float16")},
    {"layout": Layout(layers=2, kv_heads=1, head_dim=4, chunk_tokens=1)},
    {"layout": Layout(layers=1, kv_heads=2, head_dim=4, chunk_tokens=2)},
    {"layout": Layout(layers=2, kv_heads=2, head_dim=2, chunk_tokens=2)},
]


def test_everything_that_changes_the_bytes_changes_the_digest() -> None:
    for changed in CHANGES:
        base: dict[str, object] = {
            "name": "m",
            "layout": Layout(layers=2, kv_heads=1, head_dim=4, chunk_tokens=2),
            "fingerprint": "f",
            "tenant": "t",
            "attributes": {"tp": "0/2"},
        }
        one = Namespace.of(**base)  # type: ignore[arg-type]
        other = Namespace.of(**{**base, **changed})  # type: ignore[arg-type]
        assert one.digest != other.digest
        assert one.digest == Namespace.of(**base).digest  # type: ignore[arg-type]


def test_parts_of_a_namespace_cannot_be_shifted_into_each_other() -> None:
    layout = Layout(layers=1, kv_heads=1, head_dim=1)
    digests = {
        Namespace.of("ab", layout, fingerprint="c").digest,
        Namespace.of("a", layout, fingerprint="bc").digest,
        Namespace.of("a", layout, tenant="bc").digest,
        Namespace.of("a", layout, tenant="b", fingerprint="c").digest,
        Namespace.of("a", layout, attributes={"b": "c"}).digest,
        Namespace.of("a", layout, attributes={"bc": ""}).digest,
    }
    assert len(digests) == 6


@given(namespaces)
def test_a_namespace_record_is_read_back_with_the_same_digest(namespace: Namespace) -> None:
    again = Namespace.from_json(namespace.to_json())
    assert again == namespace
    assert again.digest == namespace.digest


@given(st.binary(max_size=200))
def test_random_bytes_are_no_namespace_record_and_nothing_crashes(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Namespace.from_json(content)


def test_a_token_boundary_is_no_byte_boundary() -> None:
    # The same bytes cut into other tokens are other tokens: every id takes four bytes.
    namespace = Namespace.of("m", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=1))
    assert (
        ChunkKeys.of(namespace, token_array([0x01020304])).addresses
        != ChunkKeys.of(namespace, token_array([4])).addresses
    )
    a = ChunkKeys.of(namespace, token_array([1, 0])).addresses
    b = ChunkKeys.of(namespace, token_array([0, 1])).addresses
    assert not set(a) & set(b)


def test_the_type_of_the_tokens_does_not_matter() -> None:
    kinds: tuple[Any, ...] = (np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
    for kind in kinds:
        namespace = Namespace.of("m", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=4))
        wanted = ChunkKeys.of(namespace, token_array([1, 2, 3, 400])).addresses
        assert ChunkKeys.of(namespace, token_array(np.array([1, 2, 3, 400], dtype=kind))).addresses == wanted
        backwards: TokenArray = np.array([400, 3, 2, 1], dtype=kind)[::-1]
        assert ChunkKeys.of(namespace, token_array(backwards)).addresses == wanted


def test_a_block_key_of_another_size_is_refused() -> None:
    for size in (0, 15, 65):
        namespace = Namespace.of("m", Layout(layers=1, kv_heads=1, head_dim=1))
        with pytest.raises(InvalidRequest, match="16 to 64"):
            block_address(namespace, bytes(size))


def test_a_block_never_has_the_address_of_a_chunk() -> None:
    # A chunk whose parent and tokens together are the block's key: 16 zero bytes, then one token.
    namespace = Namespace.of("m", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=1))
    chunk = ChunkKeys.of(namespace, token_array([7])).addresses[0]
    assert block_address(namespace, bytes(16) + (7).to_bytes(4, "little")) != chunk


def test_what_is_no_token_sequence_is_refused_with_what_was_expected() -> None:
    for tokens in (
        [-1],
        [0, 1, TOKEN_ID_MAX + 1],
        [1 << 70],
        [1.5],
        ["1"],
        [None],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        [True, False],
        np.array([1.0, 2.0]),
        np.array([[1, 2]]),
        np.array([-1], dtype=np.int8),
        np.array([1 << 40], dtype=np.int64),
        np.array([True]),
        b"abcd",
        bytearray(b"abcd"),
        "1234",
        iter([1, 2]),
        5,
        None,
    ):
        with pytest.raises(InvalidRequest, match=r"expected|flat sequence|one dimension"):
            token_array(tokens)  # type: ignore[arg-type]


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=str(TOKENS_MAX)):
        token_array(np.zeros(TOKENS_MAX + 1, dtype=np.uint32))


class _Index:
    def __init__(self, token: int) -> None:
        self._token = token

    def __index__(self) -> int:
        return self._token


ids_and_more = st.one_of(token_ids, st.sampled_from([-1, -(2**31), -(2**63), 2**32, 2**63, 2**64, 2**70]))


@given(st.lists(ids_and_more, min_size=1, max_size=20), st.sampled_from([list, tuple]))
def test_a_sequence_is_taken_exactly_where_every_token_is_in_range(tokens: list[int], kind: type) -> None:
    if all(0 <= token <= TOKEN_ID_MAX for token in tokens):
        assert token_array(kind(tokens)).tolist() == tokens
    else:
        with pytest.raises(InvalidRequest, match="expected"):
            token_array(kind(tokens))


@given(st.lists(ids_and_more, min_size=1, max_size=20), st.sampled_from("bhilqBHILQ"), st.sampled_from("<>"))
def test_an_array_is_taken_exactly_where_every_token_is_in_range(tokens: list[int], code: str, order: str) -> None:
    kind = np.dtype(order + code)
    ends = np.iinfo(kind)
    tokens = [token if ends.min <= token <= ends.max else int((ends.min, ends.max)[token > 0]) for token in tokens]
    array = np.array(tokens, kind)
    wrong = [at for at, token in enumerate(tokens) if not 0 <= token <= TOKEN_ID_MAX]
    for given_array in (array, np.repeat(array, 2)[::2]):
        if wrong:
            with pytest.raises(InvalidRequest, match=rf"token {tokens[wrong[0]]} at position {wrong[0]} "):
                token_array(given_array)
        else:
            assert token_array(given_array).tolist() == tokens


def test_one_odd_item_among_ints_is_refused() -> None:
    for last in (1.0, 1.5, "1", None, [1], b"1", np.float32(1)):
        with pytest.raises(InvalidRequest, match=r"expected|flat sequence"):
            token_array([1, 2, last])  # type: ignore[list-item]


def test_what_counts_as_an_int_for_python_is_a_token() -> None:
    assert token_array([np.int64(7), np.uint8(8), _Index(9)]).tolist() == [7, 8, 9]  # type: ignore[list-item]


def test_an_array_that_is_right_already_is_not_copied() -> None:
    tokens = np.arange(10, dtype="<u4")
    assert token_array(tokens) is tokens
