"""Chunks of more than 8 MiB, as large models have them: one fills a run of the bulk protocol by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout
from kvstore.writes import WriteModeName
from tests.kit.backends import WAYS, backend
from tests.kit.transports import same, tokens_and_kv

LARGE = Layout(layers=4, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=640)
"""10 MiB a chunk."""


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("write", ["behind", "through"])
@pytest.mark.parametrize("way", WAYS)
def test_large_chunks_are_read_back(tmp_root: Path, way: str, write: WriteModeName, encrypted: bool) -> None:
    prompts = [tokens_and_kv(count, seed, LARGE) for seed, count in enumerate((1, 1, 3))]
    with backend(way, tmp_root, encrypted=encrypted, layout=LARGE, memory_bytes=192 << 20) as made:
        cache = made.cache()
        for tokens, kv in prompts:
            assert cache.put(tokens, kv, write=write).tokens_present == len(tokens)
        made.settle()
        for tokens, kv in prompts:
            count, array = cache.get(tokens)
            assert count == len(tokens)
            assert same(array, kv)
            with cache.hold(tokens) as hold:
                for layer, k, v in hold.layers():
                    assert same(np.ascontiguousarray(k), np.ascontiguousarray(kv[layer, 0]))
                    assert same(np.ascontiguousarray(v), np.ascontiguousarray(kv[layer, 1]))
        made.assert_idle()
