"""The load of a worker is different in every round, and compared to the last byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from benchmarks.contents import WrongBytes, check_count, check_equal, random_bytes, stamp_chunks, stamped_right
from benchmarks.moving import BlockMover, ChunkMover, Load, mover
from kvstore import Layout
from tests.kit.cases import for_each

LAYOUT = Layout(2, 1, 64, "int8", 16)
CHUNKS = Load(LAYOUT.chunk_bytes, 3, LAYOUT, seed=1)
BLOCKS = Load(4096, 5, None, seed=1)


def test_what_was_put_comes_back_and_is_verified(tmp_root: Path) -> None:
    for kind, load in (("chunks", CHUNKS), ("blocks", BLOCKS)):
        with kvstore.open(str(tmp_root / kind)) as store:
            moves = mover(store, load)
            for call in range(2):
                moves.prepare(call)
                moves.put()
                moves.get()
                moves.verify()
            moves.prepare_one(0)
            moves.put_one()
            moves.get_one()


@for_each("kind", ["chunks", "blocks"])
def test_one_flipped_byte_is_noticed(tmp_root: Path, kind: str) -> None:
    with kvstore.open(str(tmp_root)) as store:
        moves = ChunkMover(store, CHUNKS, LAYOUT) if kind == "chunks" else BlockMover(store, BLOCKS)
        moves.prepare(0)
        moves.put()
        moves.get()
        moves.out.reshape(-1)[-7] ^= 1
        with pytest.raises(WrongBytes, match="wrong bytes"):
            moves.verify()


@for_each("kind", ["chunks", "blocks"])
def test_bytes_of_an_earlier_round_are_noticed(tmp_root: Path, kind: str) -> None:
    with kvstore.open(str(tmp_root)) as store:
        moves = ChunkMover(store, CHUNKS, LAYOUT) if kind == "chunks" else BlockMover(store, BLOCKS)
        moves.prepare(0)
        moves.put()
        moves.get()
        moves.prepare(1)
        moves.put()
        with pytest.raises(WrongBytes):
            moves.verify()


@for_each("kind", ["chunks", "blocks"])
def test_a_miss_is_not_taken_for_a_fast_read(tmp_root: Path, kind: str) -> None:
    with kvstore.open(str(tmp_root)) as store:
        moves = ChunkMover(store, CHUNKS, LAYOUT) if kind == "chunks" else BlockMover(store, BLOCKS)
        moves.prepare(0)
        moves.put()
        (bench,) = store.namespaces()
        store.namespace(bench.name, bench.layout).clear()
        moves.get()
        with pytest.raises(WrongBytes, match="read: 0 of"):
            moves.verify()
        moves.prepare_one(0)
        with pytest.raises(WrongBytes):
            moves.get_one()


def test_a_stamp_is_in_every_section_of_its_chunk_and_nowhere_else() -> None:
    kv = random_bytes(CHUNKS.size_bytes, 1).view(np.int8).reshape(LAYOUT.shape(48))
    before, stamps = kv.copy(), np.array([1, 2, 3], np.uint64)
    stamp_chunks(kv, LAYOUT, stamps)
    assert stamped_right(kv, LAYOUT, stamps) and not stamped_right(kv, LAYOUT, stamps[::-1].copy())
    changed = np.argwhere((kv != before).any(axis=(3, 4)))
    assert set(changed[:, 2].tolist()) == {0, 16, 32}
    assert len(changed) == LAYOUT.layers * 2 * 3


def test_equal_and_counted_pass() -> None:
    check_equal(np.arange(4), np.arange(4), "numbers")
    check_count(3, 3, "things")
    with pytest.raises(WrongBytes, match="things: 2 of 3"):
        check_count(2, 3, "things")
