"""Selective recomputation against full prefill and against its definition: for each kind of model, without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.connectors.transformers.decoder import Decoder, deviation
from kvstore.connectors.transformers.gate import UNMEASURED, Case, Prepared, Split, choose, prepare
from kvstore.errors import InvalidRequest
from kvstore.segments import Bounds, Rule, Verdict
from tests.engines.transformers.models import (
    deepseek,
    difference,
    gemma,
    gemma2,
    gemma3,
    llama,
    mistral,
    prompt,
    qwen2,
    qwen3,
)

MODELS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3)
}
TOKENS, SEGMENTS, ANSWERS = 101, (range(20, 50), range(50, 90)), (range(96, 99), range(99, 101))
REUSED = 70


def plan(
    rule: Rule = Rule.V, check_layers: tuple[int, ...] = (1,), ratios: tuple[float, ...] = (0.2,), **bounds: float
) -> Verdict:
    return Verdict("weights", "rope", rule, check_layers, ratios, Bounds(**bounds), UNMEASURED)


def case(seed: int = 1) -> Case:
    return Case(tuple(prompt(TOKENS, seed)[0].tolist()), SEGMENTS, ANSWERS)


CASES = [case(seed) for seed in range(1, 12)]


def prepared(model: Any) -> tuple[Decoder, Prepared]:
    decoder = Decoder(model)
    return decoder, prepare(decoder, case())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_full_prefill_is_the_models_own_and_recomputing_everything_equals_it(
    make: Callable[[], Any], attention: str
) -> None:
    model = make()
    model.set_attn_implementation(attention)
    decoder, found = prepared(model)
    with torch.no_grad():
        own = model(torch.tensor([found.case.ids])).logits[0].log_softmax(-1)
    assert difference(own[found.case.asked], found.chances) < 1e-4
    _, chances, computed = found.blended(decoder, plan(ratios=(1.0,)))
    assert difference(chances, found.chances) < 1e-4
    assert list(computed) == [REUSED] * decoder.layers
    _, nothing, computed = found.blended(decoder, plan(check_layers=(0,), ratios=(0.0,)))
    assert difference(nothing, found.chances) > 1e-2
    assert list(computed) == [0] * decoder.layers


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_the_rows_that_deviate_most_are_computed_and_the_others_keep_what_was_loaded(
    make: Callable[[], Any], rule: Rule
) -> None:
    decoder, found = prepared(make())
    kv, _, computed = found.blended(decoder, plan(rule))
    rows = found.reused.nonzero()[:, 0]
    # Layer 0 was computed in full, so what the check layer projects is what full prefill has there.
    points = deviation(rule, found.full.at(1, rows), found.loaded.at(1, rows))
    picked = set(rows[points.topk(14).indices].tolist())
    assert list(computed) == [REUSED, 14, 14, 14]
    for layer in (1, 2, 3):
        changed = (kv.keys[layer] != found.loaded.keys[layer]).any(3).any(1)[0]
        assert {row for row in changed.nonzero()[:, 0].tolist() if found.reused[row]} == picked
        kept = [row for row in rows.tolist() if row not in picked]
        assert torch.equal(kv.values[layer][:, :, kept], found.loaded.values[layer][:, :, kept])
    assert difference(kv.keys[0], found.full.keys[0]) < 1e-5
    assert difference(kv.values[1][:, :, sorted(picked)], found.full.values[1][:, :, sorted(picked)]) < 1e-4


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (deepseek, {}, "blending is for .*llama.* and this is deepseek_v3"),
        (llama, {"attention": "flex_attention"}, "a mask of its own, which flex_attention does not take"),
        (lambda: llama().train(), {}, "training mode"),
    ],
)
def test_models_that_are_built_otherwise_are_refused(
    make: Callable[[], Any], settings: dict[str, str], reason: str
) -> None:
    model = make()
    if settings:
        model.config._attn_implementation = settings["attention"]
    with pytest.raises(InvalidRequest, match=reason):
        Decoder(model)


def test_the_cheapest_that_holds_is_chosen_and_no_dearer_one_is_tried() -> None:
    decoder = Decoder(llama())
    tries = [plan(ratios=(ratio,), kl_max=0.05) for ratio in (0.05, *[1.0] * 8, 0.9)]
    moved: list[int] = []
    choice = choose(decoder, CASES, tries, tries[0].bounds, moved.append)
    assert choice.verdict.holds and choice.verdict.ratios == (1.0,)
    assert len(choice.tried) == sum(moved) == 8
    assert choice.tried[0].measured.prompts < 6, "it is given up once it cannot hold"
    assert choice.tried[1].measured.prompts == choice.searched == 6
    assert choice.verdict.measured.prompts == choice.held_out == 5
    assert choice.verdict.measured.tokens == 5 * REUSED
    assert choice.verdict.measured.agreement == 1.0 and choice.verdict.measured.kl < 1e-6


def test_a_choice_that_does_not_hold_on_the_others_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is recomputed while a rule is chosen, and nothing on the prompts that are held out."""
    held_out = {each.ids for each in Split.of(CASES).held_out}
    blended = Prepared.blended

    def worse(self: Prepared, decoder: Decoder, verdict: Verdict, *score: Any) -> Any:
        chosen = plan(check_layers=(0,), ratios=(0.0,)) if self.case.ids in held_out else verdict
        return blended(self, decoder, chosen, *score)

    monkeypatch.setattr(Prepared, "blended", worse)
    choice = choose(Decoder(llama()), CASES, [plan(ratios=(1.0,))], Bounds())
    assert choice.is_chosen and choice.tried[0].holds
    assert not choice.verdict.holds
