"""Every damage to a chunk file is a miss, counted, set aside, and repaired by the next put."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout
from kvstore.client import Store
from kvstore.client.cache import BAND_MAX
from kvstore.codec import image
from kvstore.codec.image import VERIFY_BYTES
from kvstore.core.buffers import BufferLoan, Pieces, Withdrawn
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.root.posix import PosixReader
from tests.kit.native_modes import PlainRoot, chunks_of, opened
from tests.kit.stores import TINY, chunk_files, flip, in_turn, kv_of, same, store_on

PADDING_FROM = 512
"""The header of a tiny chunk ends before this byte; zeros follow up to the payload."""


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with store_on(tmp_root) as opened:
        yield opened


def the_file(root: Path) -> Path:
    (file,) = chunk_files(root)
    return file


def telling(size: int) -> list[int]:
    """Every byte of the header and of the payload, and every 16th of the zeros between them."""
    return sorted({*range(PADDING_FROM), *range(PADDING_FROM, 4096, 16), *range(4080, size)})


def test_memory_that_was_taken_back_while_it_was_verified_is_no_damage(
    store: Store, tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens, borrowed = store.namespace("m", TINY), np.arange(TINY.chunk_tokens), BufferLoan()
    real = image.verify
    cache.put(tokens, kv_of(TINY, tokens))
    chain, sections = (
        ChunkKeys.of(cache.namespace, tokens.astype(np.uint32)),
        [memoryview(bytearray(16)) for _ in range(4)],
    )

    def verify_late(part: Pieces, sums: tuple[int, ...]) -> None:
        borrowed.withdraw()
        part[0][:] = b"the caller's now"
        real(part, sums)

    monkeypatch.setattr(image, "verify", verify_late)
    with pytest.raises(Withdrawn):
        chunks_of(store).read(chain.expected(0), sections, borrowed)
    assert the_file(tmp_root).exists() and store.stats()["miss_damaged"] == 0
    assert not list(tmp_root.glob("quarantine/*"))


def test_each_byte_flipped_is_a_miss_and_repaired(store: Store, tmp_root: Path) -> None:
    cache = store.namespace("m", TINY)
    tokens = np.arange(TINY.chunk_tokens)
    kv = kv_of(TINY, tokens)
    cache.put(tokens, kv)
    file = the_file(tmp_root)
    whole = bytearray(file.read_bytes())
    assert not any(whole[PADDING_FROM:4080]) and len(whole) > 4096
    positions = telling(len(whole))
    for position in positions:
        spoiled = whole.copy()
        spoiled[position] ^= 1 << position % 8
        file.write_bytes(spoiled)
        assert cache.get(tokens)[0] == 0, f"byte {position}"
        assert not file.exists()
        assert cache.put(tokens, kv).chunks_written == 1
        whole = bytearray(file.read_bytes())  # another incarnation
    assert store.stats()["miss_damaged"] == len(positions)
    assert same(cache.get(tokens)[1], kv)


def test_another_chunks_file_under_this_name_is_a_miss_and_repaired(store: Store, tmp_root: Path) -> None:
    cache = store.namespace("m", TINY)
    tokens = np.arange(4 * TINY.chunk_tokens)
    kv = kv_of(TINY, tokens)
    cache.put(tokens, kv)
    first, second, *_ = chunk_files(tmp_root)
    held = first.read_bytes()
    shutil.copyfile(second, first)
    second.write_bytes(held)
    assert cache.get(tokens)[0] < len(tokens)
    # Two files are damaged, and a read stops at the first: each round of get and put repairs at least one.
    for _ in range(2):
        cache.put(tokens, kv)
        count, found = cache.get(tokens)
        assert same(found, kv[:, :, :count])
    cache.put(tokens, kv)
    count, found = cache.get(tokens)
    assert count == len(tokens) and same(found, kv)


@pytest.mark.parametrize("reads", ["one by one", "together"])
def test_damage_in_a_layer_ends_the_layers_there(tmp_root: Path, reads: str) -> None:
    """If layers are read together, and one is damaged, none of them is yielded."""
    layout = replace(TINY, layers=20)
    # One thread: others would read ahead, and might set the file aside before its first layers are read.
    with store_on(tmp_root, limits=Limits(io_threads=1, width=1)) as store:
        cache = store.namespace("m", layout)
        for section in range(2 * 20):
            # Another prompt each time: reads ahead of the last one may still be busy with its file.
            tokens = np.arange(TINY.chunk_tokens) + section * TINY.chunk_tokens
            kv, before = kv_of(layout, tokens), {*chunk_files(tmp_root)}
            cache.put(tokens, kv)
            (file,) = {*chunk_files(tmp_root)} - before
            flip(file, 4096 + section * TINY.section_bytes)
            seen = []
            with cache.hold(tokens) as hold, pytest.raises(HoldBroken) as broken:
                for layer, k, v in hold.layers(in_turn(layout, len(tokens)) if reads == "one by one" else None):
                    assert same(k, kv[layer, 0]) and same(v, kv[layer, 1])
                    seen.append(layer)
            size = 1 if reads == "one by one" else BAND_MAX
            assert seen == list(range(section // 2 // size * size))
            assert broken.value.tokens_valid == 0
            assert cache.put(tokens, kv).chunks_written == 1


LARGE = Layout(layers=5, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=256)
"""Chunks of 5 MiB: more than is read and verified at once."""
TOKENS = np.arange(LARGE.chunk_tokens)
KV = kv_of(LARGE, TOKENS)
PLACES = pytest.mark.parametrize("place", [4096, 4096 + VERIFY_BYTES - 1, 4096 + VERIFY_BYTES, -1])


@pytest.fixture
def large_store(tmp_root: Path) -> Iterator[Store]:
    assert LARGE.chunk_bytes > VERIFY_BYTES
    with opened(tmp_root, native=False) as made:
        made.namespace("m", LARGE).put(TOKENS, KV)
        yield made


@PLACES
def test_i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_never_read(
    large_store: Store, tmp_root: Path, place: int
) -> None:
    cache = large_store.namespace("m", LARGE)
    file = the_file(tmp_root)
    flip(file, place)
    assert cache.get(TOKENS)[0] == 0
    assert not file.exists() and large_store.stats()["quarantined"] == 1, (
        "what is set aside is verified to its end as well"
    )


@PLACES
def test_i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_in_no_view(
    large_store: Store, tmp_root: Path, place: int
) -> None:
    cache = large_store.namespace("m", LARGE)
    with cache.hold(TOKENS) as hold:
        (view,) = hold.view()
        assert same(view, KV)
        flip(the_file(tmp_root), place)
        assert hold.view() == []


def test_i1_a_bit_that_turned_in_a_late_layer_is_in_no_layer(large_store: Store, tmp_root: Path) -> None:
    flip(the_file(tmp_root), -1)
    with large_store.namespace("m", LARGE).hold(TOKENS) as hold, pytest.raises(HoldBroken):
        for layer, k, v in hold.layers():
            assert layer < LARGE.layers - 1 and same(k, KV[layer, 0]) and same(v, KV[layer, 1])


def test_w3_what_was_repaired_between_the_look_and_the_rename_goes_back(tmp_root: Path) -> None:
    """Another node has put a whole chunk under the name of the damaged one that we have seen."""
    whole: dict[str, bytes] = {}

    class Repaired(PlainRoot):
        def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
            if name.startswith("quarantine/"):
                Path(self.path, source).write_bytes(whole["content"])
            return super().move(source, name, make_folder=make_folder)

    tokens = np.arange(TINY.chunk_tokens)
    kv = kv_of(TINY, tokens)
    with store_on(Repaired(tmp_root)) as store:
        cache = store.namespace("m", TINY)
        cache.put(tokens, kv)
        file = the_file(tmp_root)
        whole["content"] = file.read_bytes()
        flip(file, -1)
        assert cache.get(tokens)[0] == 0
        assert file.read_bytes() == whole["content"]
        assert (store.stats()["quarantine_restored"], store.stats()["quarantined"]) == (1, 0)


def test_i1_a_file_that_is_cut_while_it_is_read_is_not_taken(tmp_root: Path) -> None:
    """If the caller's memory has the missing bytes from an earlier read, their checksum is right."""
    tokens = np.arange(TINY.chunk_tokens)
    kv = kv_of(TINY, tokens)
    cuts: list[int] = []

    class Cut(PlainRoot):
        def open(self, name: Name) -> PosixReader | None:
            reader = super().open(name)
            if cuts and name.startswith("chunks/"):
                Path(self.path, name).write_bytes(Path(self.path, name).read_bytes()[: cuts[0]])
            return reader

    with store_on(Cut(tmp_root)) as store:
        cache = store.namespace("m", TINY)
        cache.put(tokens, kv)
        out = np.zeros_like(kv)
        assert cache.get(tokens, out) == len(tokens) and same(out, kv)
        cuts.append(4096 + TINY.section_bytes)
        assert cache.get(tokens, out) == 0
