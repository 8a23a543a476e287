"""Images by native code: it reads nothing outside its input, and rejects what changes while it is read."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest

from kvstore.codec.image import ImagesIn, make_images, take_images
from kvstore.core.buffers import BufferLoan, Planes
from kvstore.core.clock import RandomIds
from kvstore.core.namespace import Namespace
from kvstore.format.keyset import ChunkKeys
from kvstore.native import is_available
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import LARGE

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")


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
