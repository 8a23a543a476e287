"""Views mapped by native code: many at once, none keeps a descriptor, and all are unmapped when they are dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout
from kvstore.client.store import Store
from kvstore.engine.settings import Limits
from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.native_modes import open_files, opened
from tests.kit.stores import chunk_files, kv_of, same

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=16, dtype="int8", chunk_tokens=8)
CHUNKS = 300
TOKENS = np.arange(CHUNKS * LAYOUT.chunk_tokens, dtype=np.uint32)
KV = kv_of(LAYOUT, TOKENS)


def views_of(store: Store) -> list[np.ndarray]:
    with store.namespace("m", LAYOUT).hold(TOKENS) as hold:
        return hold.view()


def mapped_files(root: Path) -> int:
    """Returns the mapped files of this root, from the kernel's list for this process."""
    return Path("/proc/self/maps").read_text().count(f"{root}/chunks/")


def test_a_view_maps_all_its_chunks_and_keeps_no_descriptor(tmp_root: Path) -> None:
    with opened(tmp_root, native=True, limits=Limits(open_files_max=2)) as store:
        store.namespace("m", LAYOUT).put(TOKENS, KV)
        views = views_of(store)
        assert (mapped_files(tmp_root), open_files(tmp_root)) == (CHUNKS, 0)
        assert same(np.concatenate(views, axis=2), KV)
        assert not any(view.flags.writeable for view in views)
        with pytest.raises(ValueError, match="WRITEABLE"):
            views[0].flags.writeable = True
        part = views[7][0, 1, 2:5]
        del views
        assert mapped_files(tmp_root) == 1 and same(part, KV[0, 1, 7 * 8 + 2 : 7 * 8 + 5]), "what is left keeps its own"
        del part
        assert (mapped_files(tmp_root), mapped_count()) == (0, 0)


@pytest.fixture
def ten_at_most() -> Iterator[None]:
    native.library.kv_map_at_most(10)
    yield
    native.library.kv_map_at_most(16_384)


def mapped_count() -> int:
    """Returns native code's count of mappings in the whole process."""
    return int(native.library.kv_map_at_most(-1))


def test_more_than_may_be_mapped_are_copies(tmp_root: Path, ten_at_most: None) -> None:
    with opened(tmp_root, native=True) as store:
        store.namespace("m", LAYOUT).put(TOKENS, KV)
        for _ in range(3):  # after views are dropped, as many may be mapped again
            views = views_of(store)
            assert (mapped_files(tmp_root), mapped_count(), open_files(tmp_root)) == (10, 10, 0)
            assert same(np.concatenate(views, axis=2), KV)
            assert same(np.concatenate(views_of(store), axis=2), KV), "while others have all of them"
            del views
            assert (mapped_files(tmp_root), mapped_count()) == (0, 0)


def test_a_damaged_chunk_ends_the_view_and_none_stays_mapped(tmp_root: Path) -> None:
    with opened(tmp_root, native=True) as store:
        store.namespace("m", LAYOUT).put(TOKENS, KV)
        for file in chunk_files(tmp_root)[::50]:
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        views = views_of(store)
        assert len(views) < CHUNKS and mapped_files(tmp_root) == len(views)
        assert all(same(view, KV[:, :, 8 * at : 8 * at + 8]) for at, view in enumerate(views))
        del views
        assert (mapped_files(tmp_root), mapped_count()) == (0, 0)
