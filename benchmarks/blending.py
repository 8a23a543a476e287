"""Quality over work of blended prefill, by rule, on models trained from a seed; and its CPU time beside full prefill.

Hypothesis: where documents refer to earlier ones, KV that was computed alone answers such questions no better than
chance, and all others as well as full prefill does. Recomputing what deviates most in V gives the answers of full
prefill for less work than K (LMCache's rule) does. The gate's choice holds on prompts it has not seen. With 15 % of
the tokens recomputed, a prefill of 2,048 or 4,096 tokens takes 2.5 times less CPU. Quality is that of small synthetic
models: it separates rules, and says nothing about a model of yours (``kvstore blend-check`` does).

    python -m benchmarks.blending [--seeds 0 1 2] [--hops 1 2] [--prompts 60] [--plot FILE.svg]
    python -m benchmarks.blending --speed [2048 4096]

Needs torch and transformers. One thread; training takes one to five minutes of CPU for each seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.blend_model import ONE_HOP, TWO_HOPS, Recipe, trained
from benchmarks.blend_task import ASKED, Kind, Prompt, Shape, sample
from benchmarks.machine import describe
from benchmarks.plots import svg
from benchmarks.result import Cell, Plot, Result, Table, markdown, save
from kvstore.connectors.transformers.decoder import Decoder, Rows, Score, deviation, recompute
from kvstore.connectors.transformers.gate import UNMEASURED, Case, Prepared, Tally, candidates, choose, prepare
from kvstore.segments import Bounds, Rule, Verdict

RECIPES = {1: ONE_HOP, 2: TWO_HOPS}
BOUNDS = Bounds(work_max=0.6)
SEARCHED = 5000
"""Seed of the prompts that the gate gets: four times as many as are measured with another."""
MEASURED = 1000
RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
FALLING = ((0.22, 0.18, 0.15), (0.30, 0.22, 0.15), (0.40, 0.30, 0.20), (0.50, 0.40, 0.30))
SUFFIX = 64
"""Tokens of the question in the prompts of ``--speed``."""


@dataclass(slots=True)
class Scored:
    """Answers by kind, beside the figures of a verdict."""

    tally: Tally
    score: Score = deviation
    right: dict[Kind, list[bool]] = field(default_factory=lambda: {kind: [] for kind in ASKED})

    def add(self, decoder: Decoder, prompt: Prompt, prepared: Prepared) -> None:
        """Runs one prompt."""
        self.count(prompt, self.tally.add(decoder, prepared, self.score))

    def count(self, prompt: Prompt, said: Sequence[int]) -> None:
        """Counts the answers of one prompt."""
        for kind, given, answer in zip(prompt.kinds, said, prompt.answers, strict=True):
            self.right[kind].append(given == answer)

    def percent(self, kind: Kind) -> float | None:
        """Right answers of a kind; None if nothing of it was asked."""
        found = self.right[kind]
        return 100 * sum(found) / len(found) if found else None


def case_of(prompt: Prompt) -> Case:
    """The documents behind the first one are reused; each question's answer is one token."""
    ends = [*prompt.starts[1:], prompt.asked_at[0] - 1]
    segments = tuple(range(start, end) for start, end in zip(prompt.starts[1:], ends[1:], strict=True))
    answers = tuple(range(at + 1, at + 2) for at in prompt.asked_at)
    return Case(tuple(prompt.ids), segments, answers, tuple(kind.value for kind in prompt.kinds))


def prompts_of(shape: Shape, count: int, seed: int) -> list[Prompt]:
    """So many prompts of a shape."""
    chance = random.Random(seed)
    return [sample(chance, shape) for _ in range(count)]


def plan(rule: Rule, check_layers: tuple[int, ...], ratios: tuple[float, ...]) -> Verdict:
    """A verdict that nothing was measured for."""
    return Verdict("benchmark", "benchmark", rule, check_layers, ratios, BOUNDS, UNMEASURED)


REUSE = plan(Rule.V, (0,), (0.0,))
"""Reuse without recomputation."""
EVERYTHING = plan(Rule.V, (1,), (1.0,))


def quality(decoder: Decoder, prompts: Sequence[Prompt], plans: Sequence[tuple[Verdict, Score]]) -> list[Scored]:
    """Measures each plan on all prompts."""
    found = [Scored(Tally(verdict), score) for verdict, score in plans]
    for prompt in prompts:
        prepared = prepare(decoder, case_of(prompt))
        for each in found:
            each.add(decoder, prompt, prepared)
    return found


def grid(layers: int, checks: Sequence[int]) -> Iterator[tuple[str, Verdict, Score]]:
    """Rules and schedules to measure, by the name of the rule."""
    chance = torch.Generator().manual_seed(0)

    def at_random(_: Rule, new: Rows, __: Rows) -> Any:
        return torch.rand(len(new[0]), generator=chance)

    for name, rule, score in (*((each.value, each, deviation) for each in Rule), ("random", Rule.V, at_random)):
        for check in checks:
            for ratio in RATIOS:
                yield f"{name}, checked at {check}", plan(rule, (check,), (ratio,)), score
        if score is deviation:
            for ratios in FALLING:
                yield f"{name}, falling from 1", plan(rule, (1, 2, 3), ratios), score


COLUMNS = ("rule", "ratios %", "work", "cross %", "far %", "within %", "literal %", "agreement %", "KL")


def row(name: str, scored: Scored) -> list[Cell]:
    """One line of the table."""
    found = scored.tally.measured()
    ratios = ">".join(f"{100 * each:g}" for each in scored.tally.verdict.ratios)
    percents = [scored.percent(kind) for kind in (Kind.CROSS, Kind.FAR, Kind.WITHIN, Kind.LITERAL)]
    return [name, ratios, found.work, *percents, 100 * found.agreement, found.kl]


def quality_table(decoder: Decoder, recipe: Recipe, title: str, count: int) -> Table:
    """All rules on prompts that neither training nor the gate has seen."""
    named = [
        ("reuse alone", REUSE, deviation),
        ("everything", EVERYTHING, deviation),
        *grid(decoder.layers, (1, 3) if recipe is TWO_HOPS else (1,)),
    ]
    found = quality(
        decoder, prompts_of(recipe.shape, count, MEASURED), [(verdict, score) for _, verdict, score in named]
    )
    rows = [row(name, scored) for (name, _, _), scored in zip(named, found, strict=True)]
    shown = "far %" if recipe is TWO_HOPS else "cross %"
    return Table(title, COLUMNS, rows, plot=Plot("work", (shown,), "rule", "% right"))


def gate_table(decoder: Decoder, recipe: Recipe, title: str, count: int) -> Table:
    """The gate's choice: as it reports it, on prompts that it did not choose by, and on those of the table above."""
    given = [case_of(each) for each in prompts_of(recipe.shape, 4 * count, SEARCHED)]
    choice = choose(decoder, given, candidates(decoder.layers, "benchmark", "benchmark", BOUNDS), BOUNDS)
    [fresh] = quality(decoder, prompts_of(recipe.shape, count, MEASURED), [(choice.verdict, deviation)])
    verdict = choice.verdict
    name = f"{verdict.rule.value}, checked at {','.join(map(str, verdict.check_layers))}"
    said = verdict.measured
    return Table(
        title,
        ("outcome", "tried", "work, told", "lost %, told", "agreement %, told", "KL, told", *COLUMNS),
        [
            [
                "holds" if verdict.holds else "refused" if choice.is_chosen else "refused; the nearest",
                len(choice.tried),
                said.work,
                100 * said.answers_lost,
                100 * said.agreement,
                said.kl,
                *row(name, fresh),
            ]
        ],
    )


def full_row(decoder: Decoder, prompts: Sequence[Prompt]) -> dict[Kind, float | None]:
    """Right answers of full prefill by kind, percent."""
    scored = Scored(Tally(EVERYTHING))
    for prompt in prompts:
        scored.count(prompt, prepare(decoder, case_of(prompt)).chances.argmax(-1).tolist())
    return {kind: scored.percent(kind) for kind in ASKED}


def speed_table(lengths: Sequence[int]) -> Table:
    """CPU seconds of one thread: transformers' own prefill, and blended ones that include rotating all loaded keys."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).eval()
    decoder, rows = Decoder(model), list[list[Cell]]()
    for length in lengths:
        ids = torch.randint(0, 1000, (length,))
        full_s, _ = _clocked(partial(_plain, model, ids))
        for check, ratio in ((1, 0.15), (1, 0.30), (2, 0.15)):
            verdict = plan(Rule.V, (check,), (ratio,))
            blended_s, share = _clocked(partial(_blended, decoder, ids, verdict))
            rows.append([length, check, 100 * ratio, share, full_s, blended_s, full_s / blended_s])
    columns = ("tokens", "check layer", "ratio %", "work", "full, CPU s", "blended, CPU s", "times less")
    return Table("CPU of a prefill: 12 layers, d=512, random weights, 64 tokens of question", columns, rows)


def _plain(model: Any, ids: Any) -> None:
    with torch.no_grad():
        model(ids[None], use_cache=True, logits_to_keep=1)


def _blended(decoder: Decoder, ids: Any, verdict: Verdict) -> float:
    """Random KV stands for what was loaded: it does not change the cost. Returns the work."""
    count = len(ids) - SUFFIX
    reused = torch.arange(len(ids)) < count
    kv, place = decoder.empty(len(ids)), torch.arange(count)
    for layer in range(decoder.layers):
        k = torch.randn(count, decoder.kv_heads, decoder.head_dim)
        kv.write(layer, place, decoder.rotate(layer, k, place), k)
    ran = recompute(decoder, ids, kv, reused, verdict)
    decoder.logits(ran.hidden[:, -1:])
    return ran.work


def _clocked(run: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.process_time()
    found = run()
    return time.process_time() - began_s, found


def model_of(recipe: Recipe, seed: int, keep: Path | None) -> tuple[Any, float]:
    """A trained model, and the CPU seconds that it took; 0 where it was kept by a run before."""
    place = keep and keep / f"{'two' if recipe is TWO_HOPS else 'one'}-{seed}"
    if place and place.is_dir():
        return LlamaForCausalLM.from_pretrained(place).eval(), 0.0
    taken_s, model = _clocked(partial(trained, recipe, seed))
    if place:
        model.save_pretrained(place)
    return model, taken_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.blending", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="seeds to train from (0)")
    parser.add_argument("--hops", nargs="+", type=int, default=[1, 2], choices=(1, 2), help="tasks (1 2)")
    parser.add_argument("--prompts", type=int, default=60, metavar="N", help="prompts to measure on (60)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep trained models there, and use those there")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw quality over work for the last table")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the raw figures there, as JSON")
    parser.add_argument(
        "--speed", nargs="*", type=int, metavar="TOKENS", help="only the CPU time of prefills (2048 4096)"
    )
    asked = parser.parse_args(arguments)
    if asked.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    torch.set_num_threads(1)
    began_s, machine, tables, conditions = time.monotonic(), describe(), list[Table](), list[str]()
    if asked.speed is not None:
        tables.append(speed_table(asked.speed or [2048, 4096]))
        print(f"{tables[0].title}\n\n{markdown(tables[0])}")
    for hops in asked.hops if asked.speed is None else ():
        for seed in asked.seeds:
            recipe = RECIPES[hops]
            model, taken_s = model_of(recipe, seed, asked.keep)
            decoder, title = Decoder(model), f"{hops} hop{'s' * (hops > 1)}, seed {seed}"
            full = full_row(decoder, prompts_of(recipe.shape, asked.prompts, MEASURED))
            said = ", ".join(f"{kind.value} {percent:.1f} %" for kind, percent in full.items() if percent is not None)
            print(f"{title}: trained in {taken_s:.0f} s of CPU; full prefill: {said}\n", flush=True)
            table = quality_table(decoder, recipe, f"Quality over work: {title}", asked.prompts)
            chosen = gate_table(decoder, recipe, f"The gate: {title}", asked.prompts)
            conditions.append(f"{title}: full prefill answers {said}")
            tables += [table, chosen]
            for each in tables[-2:]:
                print(f"{each.title}\n\n{markdown(each)}\n", flush=True)
            if asked.plot is not None:
                asked.plot.write_text(svg(table))
    if asked.save:
        hypothesis = " ".join((__doc__ or "").split("Hypothesis: ")[1].split("\n\n")[0].split())
        took_s, name = time.monotonic() - began_s, "blending" if asked.speed is None else "blending-speed"
        save(Result(name, hypothesis, tuple(conditions), machine, tables, [], took_s), asked.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
