"""Addresses: chained, keyed with the namespace, and cut at chunk boundaries only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.address import TOKEN_ID_MAX, TOKENS_MAX, block_address
from kvstore.core.buffers import token_array
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest
from kvstore.format.keyset import ChunkKeys
from tests.kit.strategies import namespaces, token_ids

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


def test_whatever_changes_the_bytes_changes_the_digest() -> None:
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


def test_parts_of_a_namespace_cannot_be_shifted() -> None:
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
def test_namespace_record_is_read_back(namespace: Namespace) -> None:
    again = Namespace.from_json(namespace.to_json())
    assert again == namespace
    assert again.digest == namespace.digest


@given(st.binary(max_size=200))
def test_random_bytes_are_no_namespace_record(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Namespace.from_json(content)


def test_block_never_has_the_address_of_a_chunk() -> None:
    # A chunk whose parent and tokens together are the block's key: 16 zero bytes, then one token.
    namespace = Namespace.of("m", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=1))
    chunk = ChunkKeys.of(namespace, token_array([7])).addresses[0]
    assert block_address(namespace, bytes(16) + (7).to_bytes(4, "little")) != chunk
    for size in (0, 15, 65):
        with pytest.raises(InvalidRequest, match="16 to 64"):
            block_address(namespace, bytes(size))


def test_no_token_sequence_is_refused() -> None:
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
        [1, 2, 1.0],
        [1, 2, None],
        [1, 2, np.float32(1)],
        np.zeros(TOKENS_MAX + 1, dtype=np.uint32),
        5,
        None,
    ):
        with pytest.raises(InvalidRequest, match=rf"expected|flat sequence|{TOKENS_MAX}"):
            token_array(tokens)  # type: ignore[arg-type]


ids_and_more = st.one_of(token_ids, st.sampled_from([-1, -(2**31), -(2**63), 2**32, 2**63, 2**64, 2**70]))


@given(st.lists(ids_and_more, min_size=1, max_size=20), st.sampled_from([list, tuple]))
def test_sequence_in_range_is_taken(tokens: list[int], kind: type) -> None:
    if all(0 <= token <= TOKEN_ID_MAX for token in tokens):
        assert token_array(kind(tokens)).tolist() == tokens
    else:
        with pytest.raises(InvalidRequest, match="flat sequence of ids"):
            token_array(kind(tokens))


@given(st.lists(ids_and_more, min_size=1, max_size=20), st.sampled_from("bhilqBHILQ"), st.sampled_from("<>"))
def test_array_in_range_is_taken(tokens: list[int], code: str, order: str) -> None:
    kind = np.dtype(order + code)
    ends = np.iinfo(kind)
    tokens = [token if ends.min <= token <= ends.max else int((ends.min, ends.max)[token > 0]) for token in tokens]
    array = np.array(tokens, kind)
    wrong = [at for at, token in enumerate(tokens) if not 0 <= token <= TOKEN_ID_MAX]
    for given_array in (array, np.repeat(array, 2)[::2]):
        if wrong:
            with pytest.raises(InvalidRequest, match=rf"item {wrong[0]} is np\.\w+\({tokens[wrong[0]]}\)"):
                token_array(given_array)
        else:
            assert token_array(given_array).tolist() == tokens
