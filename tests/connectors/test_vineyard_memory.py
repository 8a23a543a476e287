"""KVCache with a VineyardCacheConfig in memory: the meaning of its capacity and its interval."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from kvstore.connectors.vineyard import KVCache, VineyardCacheConfig, memory_bytes
from kvstore.core.layout import Layout
from kvstore.core.write_mode import WriteModeName
from kvstore.tiers import arena
from tests.kit.cases import for_each
from tests.kit.tensors import asking, bytes_in, kv_of, over

LAYERS, SIZE = 2, 16
TOKENS = list(range(1, 13))
MIB = 1 << 20


def cache_at(folder: Path, **settings: object) -> KVCache:
    return KVCache(VineyardCacheConfig(str(folder / "v.sock")), SIZE, layer=LAYERS, **settings)  # type: ignore[arg-type]


@for_each("write", ["through", "behind"])
def test_what_was_updated_is_served_from_memory(tmp_root: Path, write: WriteModeName) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    with cache_at(tmp_root, write=write) as cache:
        assert cache.update(None, TOKENS, over(kv)) == 12
        asked = asking(12, LAYERS)
        before = cache._store.stats()["memory_hits"]
        assert cache.query(None, TOKENS, asked) == 12
        assert np.array_equal(bytes_in(asked), kv)
        assert cache._store.stats()["memory_hits"] - before == 12


def test_what_another_process_updated_is_found_in_the_folder_and_kept_when_it_is_asked_for_again(
    tmp_root: Path,
) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    with cache_at(tmp_root) as writer, cache_at(tmp_root) as reader:
        writer.update(None, TOKENS, over(kv))
        for _ in range(3):
            asked = asking(12, LAYERS)
            assert reader.query(None, TOKENS, asked) == 12
            assert np.array_equal(bytes_in(asked), kv)
        assert reader._store.stats()["memory_hits"] == 12 * 2


def test_an_update_behind_is_in_the_folder_after_closing(tmp_root: Path) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    with cache_at(tmp_root, write="behind") as cache:
        cache.update(None, TOKENS, over(kv))
    with cache_at(tmp_root) as again:
        assert again.query(None, TOKENS, asking(12, LAYERS)) == 12
    shutil.rmtree(tmp_root / "v.sock.kvstore" / "chunks")
    with cache_at(tmp_root) as empty:
        assert empty.query(None, TOKENS, asking(12, LAYERS)) == 0


def test_the_capacity_in_tokens_is_what_memory_has_room_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layout = Layout(4, 1, 4096, "int8", 1)
    token_bytes = 4096 + 4 * 2 * 4096
    monkeypatch.setattr(arena, "CGROUPS", tmp_path)
    assert memory_bytes(layout, 2000) == 2000 * token_bytes
    assert memory_bytes(layout, 1) == 16 * MIB
    assert memory_bytes(Layout(1, 1, 10, "int8", 1), 8192) == 8192 * 8192
    (tmp_path / "memory.max").write_text(f"{256 * MIB}\n")
    assert memory_bytes(layout, 10**12) == 64 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(layout, 2000) == 2000 * token_bytes
