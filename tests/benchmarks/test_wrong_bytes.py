"""Benchmarks end when the store gives wrong answers: figures of such a run mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from benchmarks import match, storage
from benchmarks.harness import baselines
from benchmarks.harness.load import WrongBytes
from benchmarks.harness.paths import IN_PROCESS
from benchmarks.memcpy import BLOCK_TOKENS, Pool, one_round
from kvstore.client.cache import BlockCache, Cache
from kvstore.format import places
from tests.benchmarks.sizes import TINY
from tests.kit.cases import for_each


def memcpy_round(root: Path) -> None:
    pool = Pool(TINY, 128 * BLOCK_TOKENS)
    pool.shuffle(1)
    with kvstore.open(str(root)) as store:
        cache = store.namespace("memcpy", TINY.layout(BLOCK_TOKENS))
        one_round(pool, IN_PROCESS, [cache], cache.clear)


def flip(real: Callable[..., Any]) -> Callable[..., Any]:
    """A get whose last byte is wrong."""

    def get(self: Cache, tokens: Any, out: Any = None) -> Any:
        found = real(self, tokens) if out is None else real(self, tokens, out)
        array = found[1] if out is None else out
        array.view(np.uint8).reshape(-1)[-1] ^= 1
        return found

    return get


CASES: dict[str, tuple[type, str, Callable[..., Any], Callable[[Path], object], str]] = {
    "memcpy": (Cache, "get", flip, memcpy_round, "read: wrong bytes"),
    "memcpy, blocks swapped": (
        *(BlockCache, "get", lambda real: lambda self, keys, buffers: real(self, keys, buffers[::-1])),
        *(memcpy_round, "get: wrong bytes"),
    ),
    "durability": (Cache, "get", flip, lambda root: storage.turn(root, "fsync", 0, 0.01, []), "fsync"),
    "match": (
        *(Cache, "match", lambda real: lambda self, tokens: max(0, real(self, tokens) - 256)),
        *(lambda root: match.latency(root, 256, 1024, 0), "tokens matched: 768 of 1024"),
    ),
}


@for_each("name", [*CASES])
def test_a_wrong_answer_ends_the_run(name: str, tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, wrong, run, message = CASES[name]
    monkeypatch.setattr(owner, method, wrong(getattr(owner, method)))
    with pytest.raises(WrongBytes, match=message):
        run(tmp_root)


def test_filler_chunks_have_the_names_of_chunks(tmp_root: Path) -> None:
    match.fill(tmp_root, 256, 20)
    match.fill(tmp_root, 256, 50)
    found = baselines.files(tmp_root / places.CHUNKS)
    assert len(found) == 50
    assert all(places.parse_chunk(path.name) is not None for path in found)
