"""Bytes to move, and the proof that they arrived: random, different in every block, compared to the last one.

A block from elsewhere must not pass for the right one, and making gigabytes of random bytes for every round would take
longer than moving them. So one random array serves all rounds, and each block of it is stamped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.buffers import KvArray

Bytes = npt.NDArray[np.uint8]
Stamps = npt.NDArray[np.uint64]
STAMP_BYTES = 8
POISON = 0xEE
REPEAT_BYTES = 8_388_617


class WrongBytes(Exception):
    """The bytes read are not those written: figures of such a run mean nothing."""


def random_bytes(count: int, seed: int) -> Bytes:
    """Returns random bytes. They repeat with a prime period, so that no two chunks or sections are equal."""
    piece = np.frombuffer(np.random.default_rng(seed).bytes(min(count, REPEAT_BYTES)), np.uint8)
    return np.resize(piece, count)


def stamp_chunks(kv: KvArray, layout: Layout, stamps: Stamps) -> None:
    """Writes ``stamps[i]`` at the start of each section of chunk i, in an array of the layout's shape."""
    raw = kv.view(np.uint8).reshape(layout.layers, 2, kv.shape[2], layout.token_bytes)
    raw[:, :, :: layout.chunk_tokens, :STAMP_BYTES] = _as_bytes(stamps)


def stamped_right(kv: KvArray, layout: Layout, stamps: Stamps) -> bool:
    """True if each section of each chunk starts with its stamp."""
    raw = kv.view(np.uint8).reshape(layout.layers, 2, kv.shape[2], layout.token_bytes)
    return bool((raw[:, :, :: layout.chunk_tokens, :STAMP_BYTES] == _as_bytes(stamps)).all())


def stamp_blocks(blocks: Bytes, stamps: Stamps) -> None:
    """Writes ``stamps[i]`` at the start of row i."""
    blocks[:, :STAMP_BYTES] = _as_bytes(stamps)


def check_equal(found: npt.NDArray[Any], expected: npt.NDArray[Any], what: str) -> None:
    """Compares every byte. Raises WrongBytes."""
    if not np.array_equal(found.view(np.uint8), expected.view(np.uint8)):
        raise WrongBytes(f"{what}: wrong bytes")


def check_count(found: int, expected: int, what: str) -> None:
    """Raises WrongBytes where fewer came back than went in: a miss costs nothing, so it would flatter the figure."""
    if found != expected:
        raise WrongBytes(f"{what}: {found} of {expected}")


def poison(array: npt.NDArray[Any]) -> None:
    """Overwrites an array, so that what an earlier round left there cannot pass for what this one read."""
    array.view(np.uint8).fill(POISON)


def _as_bytes(stamps: Stamps) -> Bytes:
    return stamps.astype("<u8").view(np.uint8).reshape(-1, STAMP_BYTES)
