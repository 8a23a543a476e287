"""Python verifies every byte of a chunk, even of one larger than what it reads at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout
from kvstore.client import Store
from kvstore.codec.image import VERIFY_BYTES
from kvstore.errors import HoldBroken
from kvstore.format.places import Name
from kvstore.root.posix import PosixReader
from tests.kit.native_modes import PlainRoot, opened
from tests.kit.stores import TINY, chunk_files, kv_of, same, store_on

LARGE = Layout(layers=5, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=256)
"""Chunks of 5 MiB: more than is read and verified at once."""
TOKENS = np.arange(LARGE.chunk_tokens)
KV = kv_of(LARGE, TOKENS)
PLACES = pytest.mark.parametrize("place", [4096, 4096 + VERIFY_BYTES - 1, 4096 + VERIFY_BYTES, -1])


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    assert LARGE.chunk_bytes > VERIFY_BYTES
    with opened(tmp_root, native=False) as made:
        made.namespace("m", LARGE).put(TOKENS, KV)
        yield made


def flip(root: Path, place: int) -> Path:
    (file,) = chunk_files(root)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    return file


@PLACES
def test_i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_never_read(store: Store, tmp_root: Path, place: int) -> None:
    cache = store.namespace("m", LARGE)
    file = flip(tmp_root, place)
    assert cache.get(TOKENS)[0] == 0
    assert not file.exists() and store.stats()["quarantined"] == 1, "what is set aside is verified to its end as well"


@PLACES
def test_i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_in_no_view(store: Store, tmp_root: Path, place: int) -> None:
    cache = store.namespace("m", LARGE)
    with cache.hold(TOKENS) as hold:
        (view,) = hold.view()
        assert same(view, KV)
        flip(tmp_root, place)
        assert hold.view() == []


def test_i1_a_bit_that_turned_in_a_late_layer_is_in_no_layer(store: Store, tmp_root: Path) -> None:
    flip(tmp_root, -1)
    with store.namespace("m", LARGE).hold(TOKENS) as hold, pytest.raises(HoldBroken):
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
        (file,) = chunk_files(tmp_root)
        whole["content"] = file.read_bytes()
        flip(tmp_root, -1)
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
