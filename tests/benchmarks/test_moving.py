"""The load of a worker is different in every round, and compared to the last byte."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from benchmarks.contents import WrongBytes
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
