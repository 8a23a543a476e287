"""Images: a made one is the chunk's file, a taken one is verified (I1), and native code and Python agree."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import Layout
from kvstore.codec.image import ImagesIn, copy_sections, make_images, take_images, verify_images
from kvstore.core.buffers import BufferLoan, Planes, Withdrawn, planes_of
from kvstore.core.clock import RandomIds
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest
from kvstore.format.header import decode
from kvstore.format.keyset import ChunkKeys
from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.fake_meta import CountingIds
from tests.kit.images import DAMAGES, Spoil, chain_of, made
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import LARGE, LAYOUTS, SMALL, TINY, chunk_files, kv_of, resealed, same, store_on

WAYS = [
    pytest.param(True, id="native", marks=pytest.mark.skipif(not is_available(), reason="no native library")),
    pytest.param(False, id="python"),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """With native code and without it."""
    if not request.param:
        monkeypatch.setattr(native, "library", native.PurePython)
    yield request.param


def taken(chain: ChunkKeys, images: list[memoryview], indexes: list[int]) -> tuple[list[bool], npt.NDArray[np.generic]]:
    layout = chain.namespace.layout
    out = np.zeros(layout.shape(len(chain.tokens)), layout.numpy_dtype)
    done = take_images(chain, indexes, images, planes_of(out, layout), BufferLoan())
    return done.tolist(), out


def test_what_is_made_is_taken_again(way: bool) -> None:
    for layout in LAYOUTS.values():
        chain = chain_of(layout, 5)
        kv = kv_of(layout, chain.tokens)
        images = made(chain, kv)
        assert verify_images(chain, range(5), images).all()
        done, out = taken(chain, images, list(range(5)))
        assert done == [True] * 5 and same(out, kv)
        done, out = taken(chain, [images[3], images[1]], [3, 1])
        size = layout.chunk_tokens
        assert done == [True, True]
        for index in range(5):
            part = kv[:, :, index * size : (index + 1) * size]
            expected = part if index in (1, 3) else np.zeros_like(part)
            assert same(out[:, :, index * size : (index + 1) * size], expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_native_code_and_python_make_the_same_bytes(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(layout, 3)
    kv = kv_of(layout, chain.tokens)
    images = made(chain, kv)
    monkeypatch.setattr(native, "library", native.PurePython)
    assert [bytes(image) for image in made(chain, kv)] == [bytes(image) for image in images]


def test_an_image_is_the_file_of_its_chunk(way: bool, tmp_root: Path) -> None:
    """Under the chunk's name it reads like any other file; only the incarnation differs from a put's."""
    chain = chain_of(SMALL, 4)
    kv = kv_of(SMALL, chain.tokens)
    images = {chain.addresses[at].hex(): bytes(image) for at, image in enumerate(made(chain, kv))}
    with store_on(tmp_root) as store:
        cache = store.namespace("m", SMALL)
        cache.put(chain.tokens, kv)
        assert cache.namespace == chain.namespace
        for file in chunk_files(tmp_root):
            content, image = file.read_bytes(), images[file.name.split(".")[0]]
            expected = decode(content)
            assert image[128 : expected.header_bytes - 8] == content[128 : expected.header_bytes - 8]
            assert image[:104] == content[:104] and image[expected.header_bytes :] == content[expected.header_bytes :]
            file.write_bytes(image)
    with store_on(tmp_root) as store:
        tokens, found = store.namespace("m", SMALL).get(chain.tokens)
        assert tokens == len(chain.tokens) and same(found, kv)


SPOILS: dict[str, Spoil] = DAMAGES | {"other bits a reader ignores": lambda whole: resealed(whole, 13, b"\x01")}


def test_i1_what_is_wrong_is_not_taken(way: bool) -> None:
    """Native code refuses some bits that a reader of version 1 ignores: then Python has the last word."""
    for how in SPOILS:
        chain = chain_of(TINY, 3)
        kv = kv_of(TINY, chain.tokens)
        images = made(chain, kv)
        images[1] = memoryview(SPOILS[how](bytes(images[1])))
        right = [True, how.endswith("bits a reader ignores"), True]
        assert verify_images(chain, range(3), images).tolist() == right
        done, out = taken(chain, images, [0, 1, 2])
        assert done == right
        size = TINY.chunk_tokens
        assert all(same(out[:, :, at * size : (at + 1) * size], kv[:, :, at * size : (at + 1) * size]) for at in (0, 2))


def test_i1_another_chunks_image_is_not_taken(way: bool) -> None:
    chain, other = chain_of(SMALL, 3), ChunkKeys.of(Namespace.of("other", SMALL), np.arange(48, dtype=np.uint32))
    kv = kv_of(SMALL, chain.tokens)
    images = made(chain, kv)
    assert verify_images(chain, [1, 0, 2], images).tolist() == [False, False, True]
    assert not verify_images(other, range(3), images).any()
    assert not taken(other, images, [0, 1, 2])[0][0]


def test_nothing_is_written_beside_sections_and_images(way: bool) -> None:
    """Sections of any size at any alignment: what lies between them stays as it was."""

    def run_case(shift: int, section_bytes: int) -> None:
        layout = Layout(layers=2, kv_heads=1, head_dim=section_bytes, dtype="int8", chunk_tokens=1)
        chain = chain_of(layout, 2)
        generator = np.random.default_rng(section_bytes + shift)
        gap = 16

        def planes_in(memory: npt.NDArray[np.uint8]) -> Planes:
            rows = memory[shift : shift + 4 * plane_bytes].reshape(2, 2, -1)[:, :, : 2 * section_bytes]
            return Planes(rows, section_bytes)

        plane_bytes = 2 * section_bytes + gap
        source = generator.integers(0, 256, 4 * plane_bytes + shift + 64, np.uint8)
        target = np.full(source.size, 0xEE, np.uint8)
        stride = -(-(chain.image_bytes(0) + 4096) // 4096) * 4096  # aligned, as slots of memory are
        memory = np.full(2 * stride, 0xEE, np.uint8)
        images = [memory[at * stride : at * stride + chain.image_bytes(0)].data for at in range(2)]
        make_images(chain, [0, 1], planes_in(source), images, CountingIds())
        assert (memory.reshape(2, -1)[:, chain.image_bytes(0) :] == 0xEE).all()
        before = memory.copy()
        assert take_images(chain, [0, 1], images, planes_in(target), BufferLoan()).all()
        assert np.array_equal(memory, before)
        expected = np.full(source.size, 0xEE, np.uint8)
        for at in range(4):
            part = slice(shift + at * plane_bytes, shift + at * plane_bytes + 2 * section_bytes)
            expected[part] = source[part]
        assert np.array_equal(target, expected)

    for shift in (0, 1, 8, 16, 48):
        for section_bytes in (1, 17, 63, 64, 240, 241, 1024, 1040, 5000, 70_001):
            run_case(shift, section_bytes)


def test_memory_that_was_taken_back_is_not_written_to(way: bool) -> None:
    chain = chain_of(SMALL, 2)
    images = made(chain, kv_of(SMALL, chain.tokens))
    out = np.zeros(SMALL.shape(len(chain.tokens)), SMALL.numpy_dtype)
    borrowed = BufferLoan()
    borrowed.withdraw()
    with pytest.raises(Withdrawn):
        take_images(chain, range(2), images, planes_of(out, SMALL), borrowed)
    with pytest.raises(Withdrawn):
        copy_sections(chain, 0, images[0], 0, planes_of(out, SMALL)(0), borrowed)
    assert not out.any()


def test_a1_images_out_of_the_memory_are_refused() -> None:
    memory = memoryview(bytearray(3 * 4096))
    assert len(ImagesIn(memory, [0, 4096, 8192], [4096] * 3)) == 3 and len(ImagesIn(memory, [], [])) == 0
    assert [len(image) for image in ImagesIn(memory, [0, 100], [4000, 5000])[1:]] == [5000]
    for offsets, size in (([0, 8193], 4096), ([0], 4 * 4096), ([1 << 63], 4096), ([(1 << 64) - 4096], 4096)):
        with pytest.raises(InvalidRequest):
            ImagesIn(memory, np.array(offsets, np.uint64), [size] * len(offsets))


@pytest.mark.skipif(not is_available(), reason="no native library")
def test_i1_bytes_that_are_replaced_while_they_are_taken_are_not_said_to_be_right() -> None:
    """Whose lease was ended while it stood still reads what another chunk is being written into."""
    count = 4
    chain = ChunkKeys.of(Namespace.of("m", LARGE), np.arange(count * LARGE.chunk_tokens, dtype=np.uint32))
    kv = np.random.default_rng(1).integers(0, 256, (1, 2, count * LARGE.section_bytes), np.uint8)
    size = chain.image_bytes(0)
    memory = np.zeros(count * size, np.uint8)
    images = ImagesIn(memory.data, [at * size for at in range(count)], [size] * count)
    make_images(chain, range(count), Planes(kv, LARGE.section_bytes), images, RandomIds())
    right, out = memory.copy(), np.zeros_like(kv)
    outcomes = [0, 0]
    turn = threading.Barrier(2)

    def replace() -> None:
        generator = np.random.default_rng(2)
        with suppress(threading.BrokenBarrierError):
            while True:
                start = int(generator.integers(0, memory.size))
                turn.wait()
                memory[start:] = 0
                turn.wait()

    thread = threading.Thread(target=replace, daemon=True)
    thread.start()
    try:
        for _ in range(60):
            memory[:] = right
            out[:] = 1
            turn.wait()
            mask = take_images(chain, range(count), images, Planes(out, LARGE.section_bytes), BufferLoan())
            for at in range(count):
                part = slice(at * LARGE.section_bytes, (at + 1) * LARGE.section_bytes)
                outcomes[int(mask[at])] += 1
                assert not mask[at] or np.array_equal(out[..., part], kv[..., part])
            turn.wait()
    finally:
        turn.abort()
    thread.join(PATIENCE_S)
    assert min(outcomes) > 0, "some were replaced, and some were not"
