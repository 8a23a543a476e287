"""Engine-hashed blocks of many sizes: keys, bytes, buffers, and by which transport they moved."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.client.store import Store
from tests.kit.transports import WAYS

COUNT = 150
"""More blocks than one WANT asks for, of more bytes than one run has."""
SIZES = (1, 4096, 100_000, 65_537, 3, 1 << 19)


Bytes = npt.NDArray[np.uint8]


def keys_of(seed: int, count: int = COUNT) -> list[bytes]:
    return [hashlib.blake2b(f"{seed}/{at}".encode(), digest_size=16 + at % 49).digest() for at in range(count)]


@lru_cache(maxsize=4)
def blocks_of(seed: int, count: int = COUNT, sizes: tuple[int, ...] = SIZES) -> list[Bytes]:
    lengths = [sizes[at % len(sizes)] for at in range(count)]
    content = np.frombuffer(np.random.default_rng(seed).bytes(sum(lengths)), np.uint8)
    # Each in memory of its own: what is copied past the end of one is not the beginning of the next.
    return [block.copy() for block in np.split(content, np.cumsum(lengths)[:-1])]


def buffers_for(blocks: list[Bytes]) -> list[Bytes]:
    return [np.zeros_like(block) for block in blocks]


def same(buffers: list[Bytes], blocks: list[Bytes]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(buffers, blocks, strict=True))


def counted(store: Store, what: str) -> dict[str, int]:
    """Counts how often each path was taken."""
    stats = store.stats()
    return {way: int(stats[f"client_{what}_{way}"]) for way in WAYS if stats[f"client_{what}_{way}"]}
