"""Each function of the library that has a twin in Python: the same results from both, over random input."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kvstore.core.layout import CHUNK_TOKENS_MAX
from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.native_widths import narrowed, of_each_width

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")

Both = tuple[Any, Any]
SIDES: Both = (native.library, native.PurePython)
SEEDS = range(20)
CHUNK_TOKENS = (*range(1, 101), 255, 256, 257, 1024, CHUNK_TOKENS_MAX)
HEADS = ((128, 128), (80, 32), (96, 96), (64, 48), (8, 6), (2, 2), (129, 100))
"""Elements of a head, and how many of them are rotated."""
IMAGES = {"kv_images_make", "kv_images_take", "kv_images_verify"}
"""Their twins leave every chunk to Python: see tests/node/test_images.py."""


def at(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


@of_each_width
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each set of instructions that this processor has."""
    with narrowed(native.library.kv_use_rotation, request.param) as chosen:
        native.library.kv_use_vectors(int(request.param == 2))
        yield chosen
        native.library.kv_use_vectors(-1)


def addresses(side: Any, generator: np.random.Generator, chunk_tokens: int) -> bytes:
    count = int(generator.integers(0, 6))
    packed = generator.bytes(4 * chunk_tokens * count)
    digest, parent, found = generator.bytes(32), generator.bytes(16), np.zeros(count, "V16")
    side.kv_addresses(digest, parent, packed, 4 * chunk_tokens, count, at(found))
    return found.tobytes()


def test_addresses_of_any_chunk_size_are_the_same(width: int) -> None:
    for chunk_tokens in CHUNK_TOKENS:
        one, other = (addresses(side, np.random.default_rng(chunk_tokens), chunk_tokens) for side in SIDES)
        assert one == other, chunk_tokens


def rotated(side: Any, generator: np.random.Generator, type: int, interleaved: bool, heads: tuple[int, int]) -> bytes:
    (head_dim, dims), planes, count = heads, 3, 37
    dtype = np.dtype(getattr(ml_dtypes, native.ROTATED[type], native.ROTATED[type]))
    keys = generator.standard_normal((planes, count, 5, head_dim))
    keys = (keys * np.exp2(generator.integers(-24, 14, keys.shape))).astype(dtype)  # small and large ones
    cosines, sines = (generator.uniform(-1, 1, (count, dims // 2)).astype(np.float32) for _ in range(2))
    starts = np.array([at(plane) for plane in keys], np.uint64)
    side.kv_rotate(at(starts), planes, at(cosines), at(sines), count, 5, head_dim, dims // 2, type, interleaved)
    return keys.tobytes()


@pytest.mark.parametrize("type", range(len(native.ROTATED)), ids=native.ROTATED)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_keys_of_any_size_have_the_same_bits(width: int, type: int, interleaved: bool) -> None:
    for heads in HEADS:
        one, other = (rotated(side, np.random.default_rng(1), type, interleaved, heads) for side in SIDES)
        assert one == other, heads


def test_copied_rows_are_the_same_and_nothing_beside_them() -> None:
    for seed in SEEDS:
        memory = []
        for side in SIDES:
            generator = np.random.default_rng(seed)
            rows, row_bytes, start = (int(generator.integers(low, high)) for low, high in ((0, 9), (1, 9000), (0, 99)))
            source = generator.integers(0, 256, (rows, start + row_bytes), np.uint8)
            target = np.zeros((rows, start + row_bytes + 8), np.uint8)
            ends = [np.array([at(row) for row in part], np.uint64) for part in (target, source)]
            side.kv_copy_rows(*map(at, ends), rows, start, row_bytes)
            memory.append(target.tobytes())
        assert memory[0] == memory[1]


def presence(side: Any, generator: np.random.Generator) -> list[Any]:
    """Adds, forgets and looks up, in a table whose rows are all fought over; returns all results and the table."""
    prints, marks = np.zeros((4, native.WAYS), np.uint64), np.zeros((4, native.WAYS), np.uint32)
    table, results = native.PresenceTable(at(prints), at(marks), 3), list[Any]()
    pool = generator.integers(0, 1 << 63, 48, np.uint64)
    for _ in range(12):
        count = int(generator.integers(0, 30))
        chunks = np.zeros(count, native.CHUNK)
        packed = np.stack([generator.choice(pool, count), np.zeros(count, np.uint64)], 1).tobytes()
        chunks["address"] = np.frombuffer(packed, "V16")
        for field, stop in (("status", 3), ("mtime_ns", 9), ("section_count", 4), ("section_bytes", 1 << 20)):
            chunks[field] = generator.integers(0, stop, count)
        places = generator.integers(0, max(1, count), count // 2).astype(np.int32)
        status, mark = int(generator.integers(0, 3)), 2 * int(generator.integers(50, 53))
        for listed in ((None, count), (at(places), len(places))):
            payload, known = ctypes.c_uint64(), table if generator.integers(0, 4) else None
            where = (at(chunks), *listed, status)
            results.append(side.kv_known_add(known, *where, mark, 5, ctypes.addressof(payload)))
            results.append(payload.value)
            if not generator.integers(0, 3):
                side.kv_known_forget(table, *where)
        for least, bits in ((0, 0), (mark, 0), (mark, 1)):
            found = np.ones(count, np.bool_)
            side.kv_known_have(table, packed, count, least, bits, at(found))
            results.append(found.tolist())
    return [*results, prints.tolist(), marks.tolist()]


def test_presence_tables_are_the_same() -> None:
    for seed in SEEDS:
        one, other = (presence(side, np.random.default_rng(seed)) for side in SIDES)
        assert one == other


def test_shared_numbers_have_the_same_sums() -> None:
    for side in SIDES:
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
                number = ctypes.c_int64.from_buffer(memory, 8)
                deltas = [5, 0, -7, 1 << 40]
                added = [side.kv_shared_add(file.fileno(), ctypes.addressof(number), delta) for delta in deltas]
                assert added == np.cumsum(deltas).tolist()
                assert memory[8:16] == added[-1].to_bytes(8, "little")
                del number


def test_withdrawn_memory_is_stopped_and_its_users_counted() -> None:
    for side in SIDES:
        for users in (0, 3):
            borrowed = native.WritePermit(0, users)
            assert (side.kv_withdraw(borrowed), borrowed.stop) == (users, 1)


def test_every_twin_is_compared() -> None:
    twins: dict[str, Callable[..., Any]] = dict(inspect.getmembers(native.PurePython, inspect.isfunction))
    here = Path(__file__).read_text()
    compared = {name for name in twins if f"side.{name}(" in here}
    assert compared | IMAGES == twins.keys()
    for name, twin in twins.items():
        assert len(inspect.signature(twin).parameters) == len(native.FUNCTIONS[name][1]) or name in IMAGES
