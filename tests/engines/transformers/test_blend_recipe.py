"""The recipe: a model trained from its seed, on which reuse alone fails, and what the gate makes of it.

A minute of CPU, with fewer layers than the recipe has. ``python -m benchmarks.blending --seeds 0 1 2`` is the whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from benchmarks.blending import (
    ASK,
    ATTEMPTS,
    BOUNDS,
    COOL_DOWN,
    MEASURED,
    ONE_HOP,
    REUSE,
    SEARCHED,
    Kind,
    Prompt,
    Recipe,
    Stage,
    case_of,
    full_row,
    plan,
    prompts_of,
    quality,
    trained,
)
from kvstore.connectors.transformers import model_cache, prefill_blended, put_segments
from kvstore.connectors.transformers.decoder import Decoder, Rows, deviation
from kvstore.connectors.transformers.gate import candidates, choose
from kvstore.segments import Rule
from tests.engines.transformers.models import difference, logits_after, logits_without_store

pytestmark = pytest.mark.slow
SHAPE = ONE_HOP.shape
OTHERS = (Kind.WITHIN, Kind.LITERAL)
COUNT = 30
GIVEN = 120
"""Prompts for the gate: half to choose by, half to report on."""
LINES = 200
"""Prompts with one question each: with fewer, the cheapest rule that loses nothing may be lucky, and is refused."""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.set_num_threads(1)
    return Decoder(trained(replace(ONE_HOP, layers=4), seed=0))


@pytest.fixture(scope="module")
def full(decoder: Decoder) -> dict[Kind, float]:
    found = full_row(decoder, prompts_of(SHAPE, COUNT, MEASURED))
    return {kind: percent for kind, percent in found.items() if percent is not None}


def test_a_model_that_the_first_stage_teaches_nothing_begins_anew_and_at_last_goes_on() -> None:
    short, steps = Stage(COOL_DOWN + 3, SHAPE, 0.97, batch=1), list[int]()
    trained(Recipe((short, replace(short)), layers=1), 0, lambda step, *_: steps.append(step))
    assert steps[: 3 * ATTEMPTS] == [1, 2, 3] * ATTEMPTS and len(steps) == 3 * ATTEMPTS + COOL_DOWN + 3


def test_reuse_alone_loses_what_other_documents_explain_and_nothing_else(
    decoder: Decoder, full: dict[Kind, float]
) -> None:
    assert min(full.values()) >= 97
    [reuse] = quality(decoder, prompts_of(SHAPE, COUNT, MEASURED), [(REUSE, deviation)])
    assert (reuse.percent(Kind.CROSS) or 0) <= full[Kind.CROSS] - 50
    assert all((reuse.percent(kind) or 0) >= full[kind] - 2 for kind in OTHERS)


def test_what_deviates_most_is_worth_more_than_as_much_at_random(decoder: Decoder) -> None:
    chance = torch.Generator(decoder.device).manual_seed(0)

    def at_random(_: Rule, new: Rows, __: Rows) -> Any:
        return torch.rand(len(new[0]), generator=chance, device=decoder.device)

    verdict = plan(Rule.V, (1,), (0.2,))
    by_v, random = quality(decoder, prompts_of(SHAPE, COUNT, MEASURED), [(verdict, deviation), (verdict, at_random)])
    assert (by_v.percent(Kind.CROSS) or 0) >= (random.percent(Kind.CROSS) or 0) + 15


def test_the_gates_choice_holds_on_prompts_that_it_has_not_seen(decoder: Decoder, full: dict[Kind, float]) -> None:
    cases = [case_of(each) for each in prompts_of(SHAPE, GIVEN, SEARCHED)]
    choice = choose(decoder, cases, candidates(decoder.layers, "weights", "rope", BOUNDS), BOUNDS)
    assert choice.verdict.holds
    assert choice.verdict.measured.prompts == choice.held_out == GIVEN // 2
    [fresh] = quality(decoder, prompts_of(SHAPE, COUNT, MEASURED), [(choice.verdict, deviation)])
    assert all((fresh.percent(kind) or 0) >= percent - 2 for kind, percent in full.items())
    assert fresh.tally.measured().kl <= 0.03


def line(prompt: Prompt) -> str:
    """A prompt with one of its questions, as a user writes it."""
    at = 1 + 2 * prompt.kinds.index(Kind.CROSS)
    asked = {"documents": prompt.documents, "question": [ASK, prompt.questions[at]]}
    return json.dumps({**asked, "answer": [prompt.questions[at + 1]], "kind": Kind.CROSS.value}) + "\n"


def test_blend_check_records_the_verdict_that_prefill_blended_uses(decoder: Decoder, tmp_path: Path) -> None:
    model, piece = decoder.model, SHAPE.document_tokens
    prompts = prompts_of(SHAPE, LINES, SEARCHED)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(map(line, prompts)))

    def check(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstore.cli.main", "blend-check", str(tmp_path / "model")]
        command += [str(tmp_path / "prompts.jsonl"), "--chunk-tokens", str(piece), "--root", str(tmp_path / "root")]
        # Threads of torch that wait for each other spin: on a busy machine one is many times faster.
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False, env=alone)

    tokens = torch.tensor([prompts[0].ids])
    with kvstore.open(tmp_path / "root") as store:
        put_segments(model, [torch.tensor([each]) for each in prompts[0].documents], store, segment_tokens=piece)
        blended = prefill_blended(model, tokens, prompts[0].starts, store, segment_tokens=piece)
        assert blended.found == 0, "nothing was checked"
        held = check()
        assert held.returncode == 0, held.stderr
        assert f"holds on {LINES // 2} prompts that had no part in the choice" in held.stdout
        blended = prefill_blended(model, tokens, prompts[0].starts, store, segment_tokens=piece)
        verdict = model_cache(model, store).segments(decoder.rope(), chunk_tokens=piece).verdict()
        assert verdict is not None and verdict.holds
        assert blended.found == 4 * piece and blended.work < 1
        said = logits_after(model, tokens, blended.past)
        assert difference(said.argmax(-1), logits_without_store(model, tokens)[:, -1:].argmax(-1)) == 0
        refused = check("--work", "0.3", "--json")
        assert refused.returncode == 1, refused.stderr
        assert json.loads(refused.stdout)["holds"] is False
        blended = prefill_blended(model, tokens, prompts[0].starts, store, segment_tokens=piece)
        assert blended.found == 0, "a check that does not hold closes the gate"
