"""The emulated engine: what it computes, loads and keeps; and that it notices the store's errors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from benchmarks import engine
from benchmarks.engine import CHUNK_TOKENS, Engine, Prompt, Settings, verify
from benchmarks.harness.load import WrongBytes, stamp_chunks
from kvstore.client.cache import Cache
from tests.benchmarks.sizes import TINY, tiny_options
from tests.kit.cases import for_each

LENGTH = 300
FULL = LENGTH // CHUNK_TOKENS * CHUNK_TOKENS


def prompt_of(seed: int, length: int = LENGTH) -> Prompt:
    return Prompt.of(np.random.default_rng(seed).integers(0, 1 << 32, length, np.uint32))


def settings(**more: Any) -> Settings:
    return Settings(TINY, 512, decode_step_s=0.0, **more)


@pytest.fixture
def cache(tmp_root: Path) -> Any:
    with kvstore.open(str(tmp_root)) as store:
        yield store.namespace("engine", TINY.layout(CHUNK_TOKENS))


@pytest.mark.parametrize("push", ["step", "behind"])
def test_a_restarted_engine_loads_stored_tokens(cache: Cache, push: str) -> None:
    first = Engine(settings(push=push), cache)
    answer = first.serve(prompt_of(1), 1)
    first.close()
    assert (answer.computed, answer.from_store, answer.resident) == (LENGTH, 0, 0)
    second = Engine(settings(push=push), cache)
    answer = second.serve(prompt_of(1), 1)
    second.close()
    assert (answer.computed, answer.from_store, answer.resident) == (LENGTH - FULL, FULL, 0)
    verify(cache, TINY, [prompt_of(1)], 512)


def test_resident_tokens_are_not_read_again(cache: Cache) -> None:
    one = Engine(settings(resident_tokens=2 * FULL), cache)
    one.serve(prompt_of(1), 1)
    assert one.serve(prompt_of(1), 1).resident == FULL
    for seed in (2, 3):
        one.serve(prompt_of(seed), 1)
    assert one.serve(prompt_of(1), 1).resident == 0
    one.close()


def test_verify_compares_every_byte(cache: Cache) -> None:
    one = Engine(settings(), cache)
    one.serve(prompt_of(1), 1)
    with pytest.raises(WrongBytes, match="0 of"):
        verify(cache, TINY, [prompt_of(2)], 512)
    kv = engine.base_kv(TINY, FULL)
    stamp_chunks(kv, TINY.layout(CHUNK_TOKENS), prompt_of(3).stamps)
    kv.view(np.uint8)[-1, -1, -1, -1, -1] ^= 1
    cache.put(prompt_of(3).tokens[:FULL], kv)
    with pytest.raises(WrongBytes, match="wrong bytes"):
        verify(cache, TINY, [prompt_of(3)], 512)
    one.close()


@pytest.mark.slow
@for_each("part", [*engine.PARTS])
def test_each_part_is_marked_as_emulated(part: str, tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QWEN_3B", "QWEN_7B"):
        monkeypatch.setattr(engine, name, TINY)
    monkeypatch.setattr(engine, "Settings", functools.partial(Settings, decode_step_s=0.0005))
    monkeypatch.setattr(engine, "BATCHES", (engine.Batch(1024, 100.0),) * 5)
    monkeypatch.setattr(engine, "touch", lambda folder, size_bytes: None)
    parts = {part: engine.PARTS[part]}
    monkeypatch.setattr(engine, "PARTS", parts)
    result = engine.run(tiny_options(tmp_root))
    (table,) = result.tables
    assert "(emulated)" in table.title and "EMULATED" in result.conditions[0]
    assert table.rows and all(cell is not None for row in table.rows for cell in row)
    if part == "hit-rate":
        assert all(isinstance(share, float) for share in table.column("shared prefix"))
    if part == "chat":
        hits = [float(share or 0) for share in table.column("tokens from the store")]
        assert hits[0] == 0 and hits == sorted(hits) and hits[-1] > 0.3
    if part == "analytics":
        assert table.column("read MiB") == [0.0]
    assert list(tmp_root.iterdir()) == []
