"""With the native data path and without it a store gives the same results, and leaves the same files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import Layout
from kvstore.format.header import decode
from kvstore.native import is_available
from tests.kit.native_modes import opened
from tests.kit.stores import LARGE, LAYOUTS, MANY, TINY, UNALIGNED, chunk_files, fresh, kv_of, same

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")


@pytest.mark.parametrize("writes_natively", [True, False], ids=["native writes", "python writes"])
def test_what_one_writes_the_other_reads(tmp_root: Path, writes_natively: bool) -> None:
    for layout in LAYOUTS.values():
        root = fresh(tmp_root)
        tokens = np.arange(5 * layout.chunk_tokens + 1)
        kv = kv_of(layout, tokens)
        with opened(root, native=writes_natively) as store:
            result = store.namespace("m", layout).put(tokens, kv)
            assert (result.chunks_written, result.chunks_found) == (5, 0)
        for file in chunk_files(root):
            header = decode(file.read_bytes()[: layout.chunk_tokens * 4 + layout.section_count * 8 + 8192])
            assert header.file_bytes == file.stat().st_size
        for native in (True, False):
            with opened(root, native=native) as store:
                cache = store.namespace("m", layout)
                count, found = cache.get(tokens)
                assert count == 5 * layout.chunk_tokens and same(found, kv[:, :, :count])
                with cache.hold(tokens) as hold:
                    views = hold.view()
                assert same(np.concatenate(views, axis=2), kv[:, :, :count])
                assert cache.put(tokens, kv).chunks_found == 5
                assert store.stats()["miss_damaged"] == 0


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_chunk_that_vanished_before_the_prefix_of_a_put_is_a_hole(tmp_root: Path, native: bool) -> None:
    tokens, end = np.arange(70 * TINY.chunk_tokens), 60 * TINY.chunk_tokens
    kv = kv_of(TINY, tokens)
    with opened(tmp_root, native=native) as store:
        cache = store.namespace("m", TINY)
        cache.put(tokens[:end], kv[:, :, :end])
        by_depth = {struct.unpack_from("<I", file.read_bytes(), 20)[0]: file for file in chunk_files(tmp_root)}
        by_depth[37].unlink()
        assert cache.match(tokens) == end, "it is remembered"
        result = cache.put(tokens, kv[:, :, end:], prefix=end)
        assert (result.tokens_present, result.chunks_written) == (37 * TINY.chunk_tokens, 0)
        assert cache.put(tokens, kv).chunks_written == 11
        assert same(cache.get(tokens)[1], kv)


@pytest.mark.parametrize("memory", [0, 64 << 20], ids=["root", "memory"])
def test_memory_that_begins_anywhere_gets_its_bytes_and_none_beside(tmp_root: Path, memory: int) -> None:
    for layout in (LARGE, MANY, UNALIGNED):
        root = fresh(tmp_root)
        tokens, guard = np.arange(2 * layout.chunk_tokens), 128
        kv = kv_of(layout, tokens)
        around = np.empty(kv.nbytes + 2 * guard, np.uint8)
        with kvstore.open(root, memory=memory) as store:
            cache = store.namespace("m", layout)
            cache.put(tokens, kv)
            for start in (*range(guard, guard + 18), guard + 63):
                around[:] = 0xA5
                out = np.ndarray(kv.shape, kv.dtype, around.data, start)
                assert cache.get(tokens, out) == len(tokens)
                assert same(out, kv), start
                assert (around[:start] == 0xA5).all() and (around[start + kv.nbytes :] == 0xA5).all(), start


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_blocks_of_many_sizes(tmp_root: Path, native: bool) -> None:
    generator = np.random.default_rng(1)
    sizes = [1, 16, 240, 241, 4096, 65_536, 300_001, 1 << 20]
    blocks = [generator.integers(0, 256, size, np.uint8) for size in sizes]
    keys = [bytes([at]) * (16 + 6 * at) for at in range(len(sizes))]
    with opened(tmp_root, native=native) as store:
        cache = store.namespace("m", TINY).blocks
        assert cache.put([*keys, keys[0]], [*blocks, blocks[0]]) == [True] * (len(keys) + 1)
        assert cache.put(keys, blocks) == [True] * len(keys)
    with opened(tmp_root, native=not native) as store:
        cache = store.namespace("m", TINY).blocks
        found = [np.zeros(size, np.uint8) for size in sizes]
        absent, other = np.zeros(16, np.uint8), np.zeros(5000, np.uint8)
        hits = cache.get([*keys, b"absent" * 4, keys[4]], [*found, absent, other])
        assert hits == [True] * len(keys) + [False, False]
        assert all(np.array_equal(left, right) for left, right in zip(found, blocks, strict=True))
        stats = store.stats()
        assert (stats["miss_absent"], stats["miss_other_size"], stats["miss_damaged"]) == (1, 1, 0)


@pytest.mark.parametrize("layout", [LARGE, MANY], ids=["large", "many"])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_what_is_not_cached_is_read_from_the_device(tmp_path: Path, layout: Layout, direct: bool) -> None:
    tokens = np.arange(12 * layout.chunk_tokens)
    kv = kv_of(layout, tokens)
    with opened(tmp_path, native=True, direct=direct) as store:
        cache = store.namespace("m", layout)
        cache.put(tokens, kv)
        out = np.zeros_like(kv)
        for spoil in (None, -5):
            for file in chunk_files(tmp_path):
                if spoil is not None:
                    with file.open("r+b") as opened_file:
                        opened_file.seek(spoil, os.SEEK_END)
                        opened_file.write(b"\xaa\xbb")
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            count = cache.get(tokens, out)
            assert count == (len(tokens) if spoil is None else 0)
            assert same(out[:, :, :count], kv[:, :, :count])
        assert store.stats()["miss_damaged"] >= 1
