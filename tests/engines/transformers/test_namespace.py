"""Everything besides the tokens that KV depends on separates namespaces: a miss, never another model's KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.client import Store
from kvstore.connectors.transformers import model_cache, prefill_with_store
from kvstore.errors import InvalidRequest
from tests.engines.transformers.models import CHUNK, generated, llama, prompt, qwen2

IDS = prompt(100)


def found(store: Store, model: Any, **settings: Any) -> int:
    """Tokens that ``model`` finds of what was stored before."""
    return model_cache(model, store, **{"chunk_tokens": CHUNK, **settings}).match(IDS[0].cpu().numpy())


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "other",
    [
        lambda: llama(seed=1),
        lambda: llama(dtype=torch.bfloat16),
        lambda: llama(rope_parameters=ROPE),
        lambda: llama(num_key_value_heads=4),
        lambda: llama(rms_norm_eps=1e-5),
        qwen2,
    ],
    ids=["weights", "dtype", "rope", "heads", "a setting that no weight shows", "architecture"],
)
def test_another_model_misses_and_computes_its_own(store: Store, other: Callable[[], Any]) -> None:
    prefill_with_store(llama(), IDS, store, chunk_tokens=CHUNK)
    assert found(store, llama()) == 96
    model = other()
    assert found(store, model) == 0
    past = prefill_with_store(model, IDS, store, chunk_tokens=CHUNK)
    assert generated(model, IDS, past) == generated(model, IDS)
    assert found(store, model) == found(store, llama()) == 96


def test_chunk_lengths_tenants_and_attributes_are_apart(store: Store) -> None:
    model = llama()
    prefill_with_store(model, IDS, store, chunk_tokens=CHUNK)
    others: list[dict[str, Any]] = [
        {"chunk_tokens": 32},
        {"tenant": "a"},
        {"attributes": {"patched": "yes"}},
        {"fingerprint": "mine"},
    ]
    for settings in others:
        assert found(store, model, **settings) == 0
        prefill_with_store(model, IDS, store, **{"chunk_tokens": CHUNK, **settings})
        assert found(store, model, **settings) == 96


@torch.no_grad()
def written_in_place(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1.0


def written_past_the_counters(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight.data *= 2.0


def replaced(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight.detach() * 1.5)


def trained(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def loaded(model: Any) -> None:
    model.load_state_dict(llama(seed=1).state_dict())


def turned(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


@pytest.mark.parametrize("change", [written_in_place, written_past_the_counters, replaced, trained, loaded, turned])
def test_weights_changed_in_memory_miss(store: Store, change: Callable[[Any], None]) -> None:
    model = llama()
    cache = model_cache(model, store, chunk_tokens=CHUNK)
    prefill_with_store(model, IDS, cache)
    assert found(store, model) == 96
    change(model)
    assert found(store, model) == 0
    with pytest.raises(InvalidRequest, match="weights have changed"):
        prefill_with_store(model, IDS, cache)


def swapped(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def set_otherwise(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def patched(model: Any) -> None:
    norm = model.model.layers[2].input_layernorm
    forward = norm.forward

    def twice(*args: Any) -> Any:
        return 2 * forward(*args)

    norm.forward = twice


@pytest.mark.parametrize("change", [swapped, set_otherwise, patched])
def test_modules_changed_in_memory_miss(store: Store, change: Callable[[Any], None]) -> None:
    model = llama()
    prefill_with_store(model, IDS, store, chunk_tokens=CHUNK)
    change(model)
    past = prefill_with_store(model, IDS, store, chunk_tokens=CHUNK)
    assert generated(model, IDS, past) == generated(model, IDS)
    assert found(store, llama()) == 96


def test_a_model_saved_and_loaded_finds_what_was_stored(store: Store, tmp_root: Path) -> None:
    model = llama()
    prefill_with_store(model, IDS, store, chunk_tokens=CHUNK)
    model.save_pretrained(tmp_root / "saved")
    assert found(store, type(model).from_pretrained(tmp_root / "saved").eval()) == 96


def test_weights_that_are_not_in_memory_need_a_fingerprint(store: Store) -> None:
    model = llama()
    model.model.layers[0].mlp.register_buffer("offloaded", torch.empty(4, device="meta"))
    with pytest.raises(InvalidRequest, match=r"not in memory.*fingerprint="):
        prefill_with_store(model, IDS, store)
    assert prefill_with_store(model, IDS, store, fingerprint="mine", chunk_tokens=CHUNK).get_seq_length() == 96


def test_a_cache_of_another_model_is_refused(store: Store) -> None:
    cache = model_cache(llama(), store, chunk_tokens=CHUNK)
    for other, said in (
        (llama(seed=1), "weights have changed"),
        (llama(rms_norm_eps=1e-5), "config is"),
        (qwen2(), "model is"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            prefill_with_store(other, IDS, cache)
    plain = store.namespace("by hand", cache.layout)
    with pytest.raises(InvalidRequest, match="no fingerprint"):
        prefill_with_store(llama(), IDS, plain)
