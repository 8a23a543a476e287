"""prefill_blended through a store: what it loads, what it refuses, and that nothing blended is ever stored as exact."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore.client import Store
from kvstore.connectors.transformers import BlendedCache, model_cache, prefill_blended, prefill_with_store, put_segments
from kvstore.connectors.transformers.cache_spec import checked, run
from kvstore.connectors.transformers.decoder import Decoder
from kvstore.connectors.transformers.gate import Case, prepare
from kvstore.connectors.transformers.prefill import _compute
from kvstore.errors import InvalidRequest
from kvstore.segments import Bounds, Measured, Rule, Segments, Verdict
from tests.engines.transformers.models import (
    CHUNK,
    difference,
    gemma,
    gemma3,
    llama,
    logits_after,
    logits_without_store,
    prompt,
    qwen3,
)
from tests.kit.stores import flip

BOS = 1
DOCUMENTS = [prompt(32, seed=11), prompt(48, seed=12), prompt(21, seed=13)]
QUESTION = prompt(7, seed=14)
PIECE = 16


def made(make: Any = llama) -> Any:
    model = make()
    model.config.bos_token_id = BOS
    return model


def ids(*order: int) -> Any:
    """BOS, documents in this order, and the question."""
    return torch.cat((torch.tensor([[BOS]]), *(DOCUMENTS[each] for each in order), QUESTION), 1)


def starts(*order: int) -> list[int]:
    found = [1]
    for each in order:
        found.append(found[-1] + DOCUMENTS[each].shape[1])
    return found


def segments_of(model: Any, store: Store) -> Segments:
    return model_cache(model, store).segments(Decoder(model).rope(), chunk_tokens=PIECE)


def verdict_for(segments: Segments, ratio: float = 0.25, kl: float = 0.0) -> Verdict:
    measured = Measured(prompts=1, tokens=1, agreement=1.0, kl=kl, answers_lost=0.0, work=0.5)
    return Verdict(segments.fingerprint, segments.rope.digest, Rule.V, (1,), (ratio,), Bounds(), measured)


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with all documents, and a verdict."""
    model = made()
    assert put_segments(model, DOCUMENTS, store, segment_tokens=PIECE) == 32 + 48 + 16
    segments = segments_of(model, store)
    segments.record(verdict_for(segments))
    return store


@pytest.mark.parametrize("make", [llama, qwen3, gemma])
def test_it_is_what_blending_in_memory_gives(make: Any, store: Store) -> None:
    model = made(make)
    put_segments(model, DOCUMENTS, store, segment_tokens=PIECE)
    verdict = verdict_for(segments_of(model, store))
    blended = prefill_blended(model, ids(2, 0, 1), starts(2, 0, 1), store, verdict, segment_tokens=PIECE)
    assert (blended.found, blended.exact) == (96, 0)
    assert blended.work == pytest.approx((96 + 3 * 24) / (4 * 96))
    assert blended.computed == ids(2, 0, 1).shape[1] - 1 - 96 + 24
    tokens = tuple(ids(2, 0, 1)[0].tolist())
    first, second, third, _ = starts(2, 0, 1)
    places = (range(first, first + 16), range(second, second + 32), range(third, third + 48))
    decoder = Decoder(model)
    case = Case(tokens, places, (range(len(tokens) - 1, len(tokens)),))
    kv, _, _ = prepare(decoder, case).blended(decoder, verdict)
    for layer, (keys, values, *_) in enumerate(blended.past):
        assert difference(keys, kv.keys[layer][:, :, :-1]) < 1e-4
        assert difference(values, kv.values[layer][:, :, :-1]) < 1e-4


def test_the_example_of_the_guide_runs(store: Store) -> None:
    page = Path(__file__, "../../../../docs/blending.md").resolve().read_text()
    example = page.partition("## Use it")[2].partition("    from ")[2].partition("\n\n`")[0]
    model, documents = made(), [prompt(130, seed=21), prompt(70, seed=22)]
    segments = model_cache(model, store).segments(Decoder(model).rope())
    segments.record(verdict_for(segments))
    given = torch.cat((torch.tensor([[BOS]]), documents[1], documents[0], QUESTION), 1)
    names: dict[str, Any] = {"model": model, "documents": documents, "store": store}
    names |= {"input_ids": given, "starts": [1, 71]}
    exec(dedent("    from " + example), names)
    assert names["blended"].found == 64 + 128 and isinstance(names["blended"].past, BlendedCache)


def exact_logits(model: Any, order: tuple[int, ...]) -> Any:
    return logits_without_store(model, ids(*order))[:, -1:]


def check_exact(model: Any, store: Store, verdict: Verdict | None = None) -> None:
    """The result uses no segment, and is exact."""
    blended = prefill_blended(model, ids(1, 0), starts(1, 0), store, verdict, segment_tokens=PIECE)
    assert blended.found == 0 and type(blended.past) is DynamicCache
    assert difference(logits_after(model, ids(1, 0), blended.past), exact_logits(model, (1, 0))) < 1e-4


def test_without_a_verdict_it_is_exact(store: Store) -> None:
    put_segments(made(), DOCUMENTS, store, segment_tokens=PIECE)
    check_exact(made(), store)


def test_a_verdict_that_does_not_hold_opens_nothing(filled: Store) -> None:
    model = made()
    check_exact(model, filled, verdict_for(segments_of(model, filled), kl=1.0))


def test_after_the_weights_changed_the_verdict_is_another_models(filled: Store) -> None:
    model = made()
    old = verdict_for(segments_of(model, filled))
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    check_exact(model, filled)
    put_segments(model, DOCUMENTS, filled, segment_tokens=PIECE)
    check_exact(model, filled)
    check_exact(model, filled, old)


def test_a_segment_that_was_damaged_or_lost_is_computed(filled: Store, tmp_root: Path) -> None:
    model = made()
    whole = prefill_blended(model, ids(1, 0), starts(1, 0), filled, segment_tokens=PIECE).found
    verdict = segments_of(model, filled).verdict()
    files = [each for each in tmp_root.rglob("*") if each.is_file() and each.stat().st_size > 4 * PIECE * 2 * 32 * 4]
    for each in files:
        flip(each, -100)
    blended = prefill_blended(model, ids(1, 0), starts(1, 0), filled, verdict, segment_tokens=PIECE)
    assert blended.found < whole
    assert difference(logits_after(model, ids(1, 0), blended.past), exact_logits(model, (1, 0))) < 1e-4


def test_a_store_that_fails_costs_no_answer(store: Store, tmp_root: Path) -> None:
    model = made()
    put_segments(model, DOCUMENTS, store, segment_tokens=PIECE)
    verdict = verdict_for(segments_of(model, store))
    shutil.rmtree(tmp_root)
    tmp_root.mkdir()
    check_exact(model, store, verdict)


def way_prefill(model: Any, store: Store, past: Any) -> None:
    prefill_blended(model, ids(1, 0), starts(1, 0), store, segment_tokens=PIECE)


def way_run_behind(model: Any, store: Store, past: Any) -> None:
    with pytest.raises(InvalidRequest, match="past is blended"):
        run(model, QUESTION, past, lambda *_: None)


def way_compute_behind_a_copy(model: Any, store: Store, past: Any) -> None:
    with pytest.raises(InvalidRequest, match="past is blended"):
        _compute(model, checked(model), ids(1, 0), copy.deepcopy(past), 80)


def way_exact_prefill_over_segments(model: Any, store: Store, past: Any) -> None:
    """The namespace of segments, opened as if it were an exact one."""
    namespace = segments_of(model, store).namespace
    with pytest.raises(InvalidRequest, match="segment"):
        store.namespace(namespace.name, namespace.layout, namespace.fingerprint, attributes=dict(namespace.attributes))
    with pytest.raises(InvalidRequest, match=r"store is a kvstore\.segments\.segments\.Segments: expected"):
        prefill_with_store(model, ids(1, 0), segments_of(model, store))  # type: ignore[arg-type]


def way_named_as_segments(model: Any, store: Store, past: Any) -> None:
    cache = model_cache(model, store, attributes={"kv": "segment"})
    assert dict(cache.namespace.attributes)["kv"] != "segment"


@pytest.mark.parametrize("way", [each for name, each in list(globals().items()) if name.startswith("way_")])
def test_no_way_leads_into_an_exact_namespace(way: Any, filled: Store) -> None:
    model = made()
    past = prefill_blended(model, ids(1, 0), starts(1, 0), filled, segment_tokens=PIECE).past
    assert isinstance(past, BlendedCache)
    before = filled.stats()["chunks_written"]
    way(model, filled, past)
    assert filled.stats()["chunks_written"] == before
    assert model_cache(model, filled).match(ids(1, 0)[0].cpu().numpy()) == 0
    cache = model_cache(model, filled, chunk_tokens=CHUNK)
    assert cache.match(ids(1, 0)[0].cpu().numpy()) == 0
    # What an exact prefill stores afterwards is exact: a second one reads it.
    for _ in range(2):
        exact = prefill_with_store(model, ids(1, 0), cache)
        assert difference(logits_after(model, ids(1, 0), exact)[:, -1:], exact_logits(model, (1, 0))) < 1e-4


def test_a_model_whose_keys_cannot_be_moved_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="different bases"):
        prefill_blended(made(gemma3), ids(0), starts(0), store)
