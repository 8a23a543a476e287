"""Chains of recent prompts: a part taken from one equals its definition, and the memory has its limits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.address import TokenArray
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest
from kvstore.format.keyset import CHAIN_CHUNKS_MAX, CHAINS_MAX, ChunkKeys, RecentChains

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=2)
ONE = Namespace.of("one", LAYOUT)
OTHER = Namespace.of("other", LAYOUT)
WIDER = Namespace.of("one", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=3))
AMPLE = 1 << 20


def as_defined(namespace: Namespace, tokens: TokenArray) -> list[bytes]:
    """FORMAT.md, section 4.1, word for word."""
    size, address, found = namespace.layout.chunk_tokens, bytes(16), []
    for start in range(0, len(tokens) - size + 1, size):
        packed = tokens[start : start + size].astype("<u4").tobytes()
        address = hashlib.blake2b(
            address + packed, digest_size=16, key=namespace.digest, person=b"kvstore.chunk.1"
        ).digest()
        found.append(address)
    return found


def assert_right(chain: ChunkKeys, namespace: Namespace, tokens: TokenArray) -> None:
    assert chain.namespace == namespace
    assert list(chain.addresses) == as_defined(namespace, tokens)
    assert chain.tokens.tolist() == tokens[: len(chain) * namespace.layout.chunk_tokens].tolist()
    for index in range(len(chain)):
        size = namespace.layout.chunk_tokens
        assert bytes(chain.chunk_tokens(index)) == tokens[index * size : (index + 1) * size].tobytes()


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[Namespace, TokenArray]]:
    """Prompts that begin like earlier ones: cut short, gone on with, changed somewhere, or asked of another model."""
    prompts: list[list[int]] = [[]]
    asked = []
    for _ in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from(prompts))
        kept = earlier[: draw(st.integers(0, len(earlier)))]
        # Few different ids, so that what differs in one place is often equal after it.
        following = kept + draw(st.lists(st.integers(0, 1), max_size=60))
        prompts.append(following)
        asked.append((draw(st.sampled_from([ONE, ONE, OTHER, WIDER])), np.array(following, np.uint32)))
    return asked


@given(conversations(), st.sampled_from([1, 800, 3000, AMPLE]))
@settings(max_examples=300, deadline=None)
def test_every_chain_is_that_of_the_definition_and_the_memory_stays_in_its_bounds(
    asked: list[tuple[Namespace, TokenArray]], bytes_max: int
) -> None:
    recent = RecentChains(bytes_max)
    for namespace, tokens in asked:
        assert_right(recent.of(namespace, tokens), namespace, tokens)
        assert recent.size_bytes <= bytes_max and len(recent) <= CHAINS_MAX


def test_a_prompt_of_too_many_chunks_is_refused() -> None:
    tiny = Namespace.of("m", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=1))
    with pytest.raises(InvalidRequest, match=f"limit of {CHAIN_CHUNKS_MAX}"):
        RecentChains(AMPLE).of(tiny, np.zeros(CHAIN_CHUNKS_MAX + 1, np.uint32))
