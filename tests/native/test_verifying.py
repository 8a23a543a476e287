"""Each check of native code by itself: what it must refuse, even if another check would find it later.

Nobody checks again what native code accepts. So these tests ask native code itself, not a node.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout
from kvstore.client.store import Store
from kvstore.codec.image import ChunkRun, verify_images
from kvstore.core.buffers import BufferLoan, new_array, planes_of
from kvstore.errors import HoldBroken, KVStoreError
from kvstore.format.keyset import ChunkKeys
from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.images import chain_of, made
from tests.kit.native_modes import chunks_of, opened
from tests.kit.programs import ended
from tests.kit.stores import LARGE, SMALL, TINY, chunk_files, flip, fresh, kv_of, resealed, same

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")

PIECE = 256 << 10
"""What is read at once; a section of LARGE has more."""
COUNT = 4

FIELDS = {
    "magic": (0, b"\x93KVCHNQ\n"),
    "version": (8, struct.pack("<H", 3)),
    "algorithms": (10, b"\x02\x01"),
    "kind": (12, b"\x01"),
    "header bytes": (16, struct.pack("<I", 8192)),
    "depth": (20, struct.pack("<I", 9)),
    "identity bytes": (24, struct.pack("<I", 12)),
    "section count": (28, struct.pack("<I", 3)),
    "section bytes": (32, struct.pack("<Q", 8)),
    "address": (40, b"a" * 16),
    "parent": (56, b"p" * 16),
    "namespace": (72, b"n" * 32),
    "tokens": (128, struct.pack("<I", 77)),
}


@pytest.fixture(params=["pieces", "straight"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How native code reads into memory that is aligned: by itself it takes the way that suits the processor."""
    native.library.kv_use_straight(request.param == "straight")
    yield request.param
    native.library.kv_use_straight(-1)


def test_i1_an_image_whose_header_says_otherwise_is_not_taken() -> None:
    """Its checksum is right: somebody has written it so."""
    for field in FIELDS:
        chain = chain_of(TINY, 3)
        images = made(chain, kv_of(TINY, chain.tokens))
        images[1] = memoryview(resealed(bytes(images[1]), *FIELDS[field]))
        assert verify_images(chain, range(3), images).tolist() == [True, False, True]


@contextmanager
def filled(root: Path, layout: Layout, chunks: int = COUNT) -> Iterator[tuple[Store, ChunkRun, np.ndarray]]:
    """A store with a prompt in it, and a run of its chunks into an array."""
    tokens = np.arange(chunks * layout.chunk_tokens)
    with opened(root, native=True) as store:
        cache = store.namespace("m", layout)
        cache.put(tokens, kv_of(layout, tokens))
        out = new_array(layout.shape(len(tokens)), layout.numpy_dtype)
        out[:] = 0
        chain = ChunkKeys.of(cache.namespace, tokens.astype(np.uint32))
        run = chunks_of(store).run(chain, 0, chunks, planes_of(out, layout))
        assert run is not None
        yield store, run, out


def file_of(root: Path, depth: int) -> Path:
    return next(file for file in chunk_files(root) if struct.unpack_from("<I", file.read_bytes()[:24], 20)[0] == depth)


IN_SECTIONS = {
    "first piece": 4096,
    "later piece": 4096 + PIECE + 1,
    "end of a section": 4096 + LARGE.section_bytes - 1,
    "last section": -1,
}


def test_i1_a_file_with_a_bit_turned_in_any_piece_is_not_read(tmp_root: Path, way: str) -> None:
    for where in IN_SECTIONS:
        root = fresh(tmp_root)
        with filled(root, LARGE) as (_, run, out):
            flip(file_of(root, 2), IN_SECTIONS[where])
            assert run.read(0, COUNT, BufferLoan()).tolist() == [True, True, False, True]
            assert out[:, :, : 2 * LARGE.chunk_tokens].any()


def test_i1_a_layer_with_a_bit_turned_in_any_piece_is_not_read(tmp_root: Path, way: str) -> None:
    for where in IN_SECTIONS:
        root = fresh(tmp_root)
        tokens = np.arange(COUNT * LARGE.chunk_tokens)
        kv = kv_of(LARGE, tokens)
        with filled(root, LARGE) as (store, _, _):
            flip(file_of(root, 2), IN_SECTIONS[where])
            layer = new_array(kv.shape[1:], LARGE.numpy_dtype)
            with store.namespace("m", LARGE).hold(tokens) as hold, pytest.raises(HoldBroken) as broken:
                for _, k, v in hold.layers([layer]):
                    assert same(k, kv[0, 0]) and same(v, kv[0, 1])
            assert broken.value.tokens_valid == 2 * LARGE.chunk_tokens


def drops_from(file: Path, at: int) -> bool:
    """Takes a file out of the page cache from about ``at`` on; False if its end is still there."""
    with file.open("rb") as opened_file:
        os.fsync(opened_file.fileno())
        os.posix_fadvise(opened_file.fileno(), at, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(opened_file.fileno(), [bytearray(1)], file.stat().st_size - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        return False


def test_a_file_of_which_the_end_is_not_cached_is_read_all_the_same(tmp_path: Path, way: str) -> None:
    for where in IN_SECTIONS:
        for spoiled in (False, True):
            root = fresh(tmp_path)
            at = IN_SECTIONS[where] if IN_SECTIONS[where] > 0 else LARGE.chunk_bytes
            with filled(root, LARGE) as (_, run, out):
                if spoiled:
                    flip(file_of(root, 2), IN_SECTIONS[where])
                if not all(drops_from(file, at // 4096 * 4096) for file in chunk_files(root)):
                    pytest.skip("this file system does not drop a file from the page cache")
                right = run.read(0, COUNT, BufferLoan()).tolist()
                assert right == [True, True, not spoiled, True]
                kv = kv_of(LARGE, np.arange(COUNT * LARGE.chunk_tokens))
                for chunk in np.flatnonzero(right):
                    tokens = slice(chunk * LARGE.chunk_tokens, (chunk + 1) * LARGE.chunk_tokens)
                    assert same(out[:, :, tokens], kv[:, :, tokens])


def test_i1_another_chunks_file_is_not_read(tmp_root: Path, way: str) -> None:
    with filled(tmp_root, LARGE) as (_, run, _):
        file_of(tmp_root, 2).write_bytes(file_of(tmp_root, 1).read_bytes())
        assert run.read(0, COUNT, BufferLoan()).tolist() == [True, True, False, True]


def test_i1_a_layer_of_another_chunks_file_is_not_read(tmp_root: Path) -> None:
    tokens = np.arange(COUNT * SMALL.chunk_tokens)
    kv = kv_of(SMALL, tokens)
    with filled(tmp_root, SMALL) as (store, _, _):
        with store.namespace("m", SMALL).hold(tokens) as hold:
            file_of(tmp_root, 2).write_bytes(file_of(tmp_root, 1).read_bytes())
            with pytest.raises(HoldBroken):
                for layer, k, v in hold.layers():
                    assert same(k, kv[layer, 0]) and same(v, kv[layer, 1])


def open_parts(run: ChunkRun) -> tuple[np.ndarray, np.ndarray]:
    """Images and checksums for ``kv_read_parts``, after the files were opened and their headers verified."""
    images = np.zeros(run.count, np.uint64)
    tables = np.zeros((run.count, int(run.items["section_count"][0])), np.uint64)
    native.library.kv_open_parts(run.common, *run.part(0, run.count), images.ctypes.data, tables.ctypes.data)
    return images, tables


def test_i1_parts_of_a_file_with_another_header_are_not_opened(tmp_root: Path) -> None:
    with filled(tmp_root, SMALL) as (_, run, _):
        run.items["fd"] = -1
        flip(file_of(tmp_root, 2), 60)
        open_parts(run)
        assert (run.items["status"] == native.DONE).tolist() == [True, True, False, True]
        native.library.kv_close(*run.part(0, COUNT))


@pytest.mark.parametrize("place", [60, 4096 + SMALL.section_bytes], ids=["header", "section"])
def test_i1_parts_of_a_corrupt_image_are_not_taken(tmp_root: Path, place: int) -> None:
    chain = chain_of(SMALL, COUNT)
    images = made(chain, kv_of(SMALL, chain.tokens))
    images[2][place] ^= 1
    with filled(tmp_root, SMALL) as (_, run, _):
        places = np.array([np.frombuffer(image, np.uint8).ctypes.data for image in images], np.uint64)
        tables = np.zeros((COUNT, SMALL.section_count), np.uint64)
        native.library.kv_images_tables(run.common, *run.part(0, COUNT), places.ctypes.data, tables.ctypes.data)
        if place > 4096:
            assert (run.items["status"] == native.DONE).all(), "the header is valid"
            native.library.kv_read_parts(run.common, *run.part(0, COUNT), places.ctypes.data, tables.ctypes.data, 1, 1)
        assert (run.items["status"] == native.DONE).tolist() == [True, True, False, True]


def test_i1_a_file_that_comes_in_pieces_is_verified_as_it_comes(tmp_root: Path) -> None:
    for place, right in ((None, True), (60, False), (4100, False), (-1, False)):
        root = fresh(tmp_root)
        with filled(root, SMALL) as (_, run, _):
            content = bytearray(file_of(root, 1).read_bytes())
            if place is not None:
                content[place] ^= 1
            header, verified = np.empty(4096, np.uint8), ctypes.create_string_buffer(native.VERIFIED_BYTES)
            outcomes: set[int] = set()
            for start in range(0, len(content), 1000):
                piece = np.frombuffer(bytes(content[start : start + 1000]), np.uint8)
                if outcomes - {native.DONE}:
                    break
                at, _ = run.part(1, 2)
                taken = native.library.kv_take(
                    run.common, at, header.ctypes.data, verified, piece.ctypes.data, len(piece), start
                )
                outcomes.add(taken)
            assert (outcomes == {native.DONE}) is right


@pytest.mark.parametrize("size_bytes", [-1, 1], ids=["shorter", "longer"])
def test_i1_a_file_of_another_size_is_neither_opened_nor_found(tmp_root: Path, size_bytes: int) -> None:
    with filled(tmp_root, SMALL) as (_, run, _):
        file = file_of(tmp_root, 2)
        content = file.read_bytes()
        file.write_bytes(content[:-1] if size_bytes < 0 else content + b"\0")
        native.library.kv_open(run.common, *run.part(0, COUNT))
        assert (run.items["status"] == native.BLOCKED).tolist() == [True, True, False, True]
        native.library.kv_close(*run.part(0, COUNT))
        assert run.look(0, COUNT)[0].tolist() == [True, True, False, True]


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_i1_a_file_that_is_cut_after_it_was_opened_is_not_read(tmp_root: Path, way: str, layout: Layout) -> None:
    """If a thread has just read the same chunk, the missing bytes are still in its memory."""
    with filled(tmp_root, layout, 1) as (_, run, _):
        for _ in range(2):
            assert run.read(0, 1, BufferLoan()).all()
        native.library.kv_open(run.common, *run.part(0, 1))
        file = file_of(tmp_root, 0)
        with file.open("r+b") as cut:
            cut.truncate(4096 + layout.section_bytes)
        assert not run.read_open(0, 1, BufferLoan()).any()


def test_a_put_that_could_not_be_written_leaves_nothing(tmp_root: Path) -> None:
    """A full disk does this, for one: a truncated file is never published."""
    tokens = np.arange(SMALL.chunk_tokens)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(tokens + 1, kv_of(SMALL, tokens + 1))  # Python makes the folder in which native code stages
        before = chunk_files(tmp_root)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(KVStoreError):
                cache.put(tokens, kv_of(SMALL, tokens))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert chunk_files(tmp_root) == before and not list(tmp_root.glob("staging/*/*"))


LONG_NAME = """
import numpy as np
from kvstore.native import library as native

items = np.zeros(1, native.CHUNK)
native.library.kv_look(native.Common(root=b"/" + b"a" * 4_060, shard_bits=8), items.ctypes.data, 1)
print(int(items["status"][0]) == native.OTHER)
"""


def test_a_root_whose_name_is_too_long_is_left_to_python() -> None:
    """In a separate process: a name that does not fit would overwrite the memory behind it."""
    done = ended(sys.executable, "-c", LONG_NAME)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr[-500:]
