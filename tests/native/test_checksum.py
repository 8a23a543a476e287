"""Our own XXH3-64 equals python-xxhash's, in every form, at every length, and in whatever pieces bytes arrive."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.native_widths import narrowed, of_each_width

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")


@of_each_width
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    with narrowed(native.library.kv_use_width, request.param) as chosen:
        yield chosen


def checksum(content: npt.NDArray[np.uint8]) -> int:
    found: int = native.library.kv_checksum(content.ctypes.data, content.size)
    return found


def test_every_length_up_to_some_blocks(width: int) -> None:
    content = np.random.default_rng(width).integers(0, 256, 5_000, np.uint8)
    for size in range(4_200):
        part = content[size % 7 : size % 7 + size]  # not aligned to anything
        assert checksum(part) == xxhash.xxh3_64_intdigest(part.tobytes()), f"{size} bytes"


def test_large_inputs_of_random_sizes(width: int) -> None:
    generator = np.random.default_rng(100 + width)
    content = generator.integers(0, 256, 3 << 20, np.uint8)
    for _ in range(40):
        start, stop = sorted(generator.integers(0, content.size, 2).tolist())
        assert checksum(content[start:stop]) == xxhash.xxh3_64_intdigest(content[start:stop].tobytes())


def test_arriving_in_parts_of_any_size(width: int) -> None:
    for size in (1, 240, 241, 1023, 1024, 1025, 2048, 2049, 10_000, 65_536, 100_001):
        generator = np.random.default_rng(size)
        content = generator.integers(0, 256, size, np.uint8)
        for _ in range(20):
            state = (ctypes.c_uint64 * 9)()
            native.library.kv_hash_begin(state)
            arrived = 0
            while arrived < size:
                arrived = min(size, arrived + int(generator.integers(1, 3_000)))
                native.library.kv_hash_absorb(state, content.ctypes.data, size, arrived)
            assert native.library.kv_hash_end(state, content.ctypes.data, size) == xxhash.xxh3_64_intdigest(
                content.tobytes()
            )
