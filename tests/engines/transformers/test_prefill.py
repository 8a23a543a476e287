"""prefill_with_store against transformers without a store: the same logits, the same tokens, less to compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from kvstore.client import Store
from kvstore.connectors.transformers import prefill_with_store
from tests.engines.transformers.models import (
    CHUNK,
    MODELS,
    difference,
    generated,
    llama,
    logits_after,
    logits_without_store,
    prompt,
)
from tests.kit.workers import serving


def moved(store: Store) -> tuple[float, float]:
    """Chunks read and written so far."""
    stats = store.stats()
    return stats["chunks_read"], stats["chunks_written"]


@pytest.mark.smoke
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_cold_and_warm_have_the_logits_of_a_run_without_the_store(make: Callable[[], Any], tmp_root: Path) -> None:
    model, ids = make(), prompt(100)
    expected = logits_without_store(model, ids, 96)
    with kvstore.open(str(tmp_root)) as store:
        past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK)
        assert past.get_seq_length() == 96
        assert difference(logits_after(model, ids, past), expected) == 0.0
        assert moved(store) == (0, 6)
    with kvstore.open(str(tmp_root)) as store:
        past = prefill_with_store(make(), ids, store, chunk_tokens=CHUNK)
        assert past.get_seq_length() == 96
        assert difference(logits_after(model, ids, past), expected) == 0.0
        assert moved(store) == (6, 0)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_generate_goes_on_from_it_with_the_tokens_of_a_plain_run(make: Callable[[], Any], store: Store) -> None:
    model, ids = make(), prompt(100)
    expected = generated(model, ids)
    for _ in range(2):
        past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK)
        assert generated(model, ids, past) == expected
    plain = logits_without_store(model, ids)[:, 96:]
    past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK)
    assert difference(logits_after(model, ids, past), plain) < 1e-4, "another split rounds otherwise, no more"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_to_the_bit(dtype: Any, store: Store) -> None:
    model, ids = llama(dtype=dtype), prompt(70)
    expected = logits_without_store(model, ids, 64)
    for _ in range(2):
        past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK)
        assert difference(logits_after(model, ids, past), expected) == 0.0
    assert moved(store) == (4, 4)


@pytest.mark.parametrize(
    ("length", "held"),
    [(1, 0), (CHUNK - 1, 0), (CHUNK, 0), (CHUNK + 1, CHUNK), (2 * CHUNK, CHUNK), (2 * CHUNK + 1, 32)],
)
def test_at_least_one_token_is_left_to_compute(length: int, held: int, store: Store) -> None:
    model, ids = llama(), prompt(length)
    prefill_with_store(model, prompt(3 * CHUNK, 2, ids), store, chunk_tokens=CHUNK)
    past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK)
    assert past.get_seq_length() == held
    assert generated(model, ids, past, 3) == generated(model, ids, tokens=3)


def test_through_a_worker(tmp_root: Path) -> None:
    model, ids = llama(), prompt(100)
    expected = logits_without_store(model, ids, 96)
    with serving(tmp_root) as served, kvstore.connect(served.address) as store:
        puts = []
        for _ in range(2):
            past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK)
            assert past.get_seq_length() == 96
            assert difference(logits_after(model, ids, past), expected) == 0.0
            puts.append(served.member.node.stats()["requests_put"])
        assert served.member.node.stats()["chunks_written"] == 6
        assert puts[0] == puts[1] > 0, "the second prefill computed nothing"
