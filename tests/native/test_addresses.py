"""Addresses from the native library are those of Python's, for every length a chunk may have."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.address import Address, chained_addresses
from kvstore.layout import CHUNK_TOKENS_MAX, Layout
from kvstore.namespace import Namespace
from kvstore.native import library
from kvstore.node import chains
from tests.kit.strategies import texts

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not in use")


def namespace_of(chunk_tokens: int, name: str = "m") -> Namespace:
    return Namespace.of(name, Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=chunk_tokens))


def chained(namespace: Namespace, packed: bytes, first: int, parent: bytes) -> list[bytes]:
    found = chains._chained(namespace.digest, parent, packed, 4 * namespace.layout.chunk_tokens, first)
    return [found[at : at + 16] for at in range(0, len(found), 16)]


@pytest.fixture(params=[False, True], ids=["plain", "vectors"])
def vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    try:
        if library.library.kv_use_vectors(request.param) != request.param:
            pytest.skip("this processor has no such instructions")
        yield
    finally:
        library.library.kv_use_vectors(-1)


def test_every_size_of_a_chunk_around_the_blocks_of_the_hash(vectors: None) -> None:
    for chunk_tokens in (*range(1, 101), 255, 256, 257, 1024, CHUNK_TOKENS_MAX):
        namespace, packed = namespace_of(chunk_tokens), os.urandom(4 * chunk_tokens * 3 + 3)
        expected = chained_addresses(namespace, packed)
        assert chained(namespace, packed, 0, bytes(16)) == expected and len(expected) == 3
        assert chained(namespace, packed, 1, expected[0]) == expected[1:]
        assert chained(namespace, packed, 3, expected[2]) == []


def test_prompts_at_once_have_the_addresses_that_each_has_alone(vectors: None) -> None:
    for chunk_tokens in (1, 27, 28, 29, 64, 100):
        namespace, counts = namespace_of(chunk_tokens), [3, 0, 1, 5, 0]
        prompts = [os.urandom(4 * chunk_tokens * count) for count in counts]
        found = chains._chained_each(namespace.digest, b"".join(prompts), 4 * chunk_tokens, counts)
        assert found == b"".join(address for packed in prompts for address in chained_addresses(namespace, packed))
        assert chains._chained_each(namespace.digest, b"", 4 * chunk_tokens, [0]) == b""


@given(
    texts.filter(bool),
    st.integers(1, 70),
    st.binary(max_size=900),
    st.integers(0, 3),
    st.binary(min_size=16, max_size=16),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_namespace_tokens_and_parent(
    vectors: None, name: str, chunk_tokens: int, packed: bytes, first: int, parent: bytes
) -> None:
    namespace = namespace_of(chunk_tokens, name)
    expected = chained_addresses(namespace, packed, first, Address(parent))
    assert chained(namespace, packed, first, parent) == expected
    assert all(isinstance(address, bytes) and len(address) == 16 for address in expected)
