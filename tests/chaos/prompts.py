"""The prompts of the chaos tests: tokens and KV that follow from a number, so that any process can verify any byte."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.core.namespace import Namespace
from kvstore.format.keyset import ChunkKeys
from tests.kit.stores import kv_of

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=64, dtype="int8", chunk_tokens=16)
SPACE = Namespace.of("chaos", LAYOUT)

FAMILY = 10
"""Prompts that share a prefix."""
SHARED_CHUNKS_MAX = 4
OWN_CHUNKS_MAX = 6


@lru_cache(256)
def chain_of(number: int) -> ChunkKeys:
    """Returns the chain of prompt ``number``: chunks shared by its family, then its own."""
    family = random.Random(number // FAMILY)
    shared = family.randint(1, SHARED_CHUNKS_MAX) * LAYOUT.chunk_tokens
    own = random.Random(~number).randint(1, OWN_CHUNKS_MAX) * LAYOUT.chunk_tokens
    tokens = np.empty(shared + own, np.uint32)
    tokens[:shared] = np.arange(shared) + 1_000 * (number // FAMILY)
    tokens[shared:] = np.arange(own) + 1_000_000 + 1_000 * number
    return ChunkKeys.of(SPACE, tokens)


@lru_cache(256)
def kv(number: int) -> npt.NDArray[Any]:
    """The KV of prompt ``number``."""
    return kv_of(LAYOUT, chain_of(number).tokens)


def chunk_bytes(number: int, index: int) -> bytes:
    """The payload of one chunk of a prompt."""
    size = LAYOUT.chunk_tokens
    return kv(number)[:, :, index * size : (index + 1) * size].tobytes()
