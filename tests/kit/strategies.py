"""Random namespaces, chains and chunk files for property tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvstore.core.address import BLOCK_KEY_BYTES_MAX, BLOCK_KEY_BYTES_MIN
from kvstore.core.buffers import token_array
from kvstore.core.layout import DTYPES, Layout
from kvstore.core.namespace import Namespace
from kvstore.format.header import Expected, Incarnation, expected_block
from kvstore.format.keyset import ChunkKeys
from tests.kit.images import encoded

token_ids = st.integers(0, 2**32 - 1)
layouts = st.builds(
    Layout,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    dtype=st.sampled_from(sorted(DTYPES)),
    chunk_tokens=st.integers(1, 7),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
namespaces = st.builds(
    Namespace.of,
    name=texts.filter(bool),
    layout=layouts,
    fingerprint=texts,
    tenant=texts,
    attributes=st.dictionaries(texts, texts, max_size=3),
)


@dataclass(frozen=True)
class ChunkFile:
    """A chunk as it is stored, and a reader's expectations of it."""

    expected: Expected
    incarnation: Incarnation
    payload: bytes
    content: bytes


def chunk_file(expected: Expected, incarnation: bytes, payload: bytes) -> ChunkFile:
    """Encodes a chunk."""
    return ChunkFile(expected, Incarnation(incarnation), payload, encoded(expected, payload, incarnation))


@st.composite
def chunk_files(draw: st.DrawFn) -> ChunkFile:
    """A chunk of tokens somewhere in a chain, or a block."""
    namespace = draw(namespaces)
    if draw(st.booleans()):
        key = draw(st.binary(min_size=BLOCK_KEY_BYTES_MIN, max_size=BLOCK_KEY_BYTES_MAX))
        descent = draw(st.binary(max_size=64) | st.just(bytes(range(1, 225)) * 16))
        expected = expected_block(namespace, key, draw(st.integers(1, 300)), descent)
    else:
        size = namespace.layout.chunk_tokens
        tokens = draw(st.lists(token_ids, min_size=size, max_size=4 * size))
        chain = ChunkKeys.of(namespace, token_array(tokens))
        expected = chain.expected(draw(st.integers(0, len(chain) - 1)))
    seed = draw(st.integers(0, 255))
    payload = bytes((seed + 31 * n) % 256 for n in range(expected.payload_bytes))
    return chunk_file(expected, draw(st.binary(min_size=16, max_size=16)), payload)
