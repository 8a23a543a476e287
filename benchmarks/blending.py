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
import enum
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.machine import describe
from benchmarks.harness.report import svg
from benchmarks.harness.result import Cell, Plot, Result, Table, markdown, save
from kvstore.connectors.transformers.decoder import Decoder, Rows, Score, deviation, recompute
from kvstore.connectors.transformers.gate import UNMEASURED, Case, Prepared, RuleFigures, candidates, choose, prepare
from kvstore.segments import Bounds, Rule, Verdict

# Synthetic prompts of several documents, in which a document says what only an earlier one explains.
#
# A prompt is BOS, documents (SEP, then statements in any order), and questions (ASK, then pairs of key and value).
# Every statement is one token: ``define(alias, value)``; ``literal(key, value)``; ``refer(key, alias)``, whose alias
# is defined within the document or in an earlier one (``CROSS``); ``link(alias, other)``, an alias for one of an
# earlier document, and references to it (``FAR``: two hops); and fillers. The answer to a key is its value, behind
# aliases where it has some. Made for blending: KV of a document computed alone cannot know what a ``CROSS`` or ``FAR``
# reference means.


VALUES, ALIASES, KEYS, FILLERS = 10, 16, 32, 32
DEFINE = VALUES  # + alias * VALUES + value
LITERAL = DEFINE + ALIASES * VALUES  # + key * VALUES + value
REFER = LITERAL + KEYS * VALUES  # + key * ALIASES + alias
QUESTION = REFER + KEYS * ALIASES  # + key
FILLER = QUESTION + KEYS
BOS, SEP, ASK = range(FILLER + FILLERS, FILLER + FILLERS + 3)
LINK = ASK + 1  # + alias * ALIASES + other
VOCABULARY = LINK + ALIASES * ALIASES


class Kind(enum.Enum):
    """The kinds of statements; those from CROSS on are asked about."""

    DEFINE = "define"
    LINK = "link"
    FILLER = "filler"
    CROSS = "cross"
    FAR = "far"
    WITHIN = "within"
    LITERAL = "literal"


ASKED = (Kind.CROSS, Kind.FAR, Kind.WITHIN, Kind.LITERAL)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many statements of each kind a document has. The first one has fillers for what needs an earlier one."""

    documents: int = 4
    define: int = 4
    cross: int = 3
    within: int = 2
    literal: int = 3
    filler: int = 12
    link: int = 0
    far: int = 0
    questions: int = 12

    @property
    def document_tokens(self) -> int:
        """Tokens of a document, its SEP included."""
        return 1 + self.define + self.cross + self.within + self.literal + self.filler + self.link + self.far


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``kinds`` are those of its questions; ``meanings`` the values behind references, by index."""

    documents: list[list[int]]
    questions: list[int]
    kinds: list[Kind]
    meanings: dict[int, int]

    @property
    def ids(self) -> list[int]:
        """All tokens, BOS first."""
        return [BOS, *(token for document in self.documents for token in document), *self.questions]

    @property
    def starts(self) -> list[int]:
        """The index of each document's first token."""
        return [1 + sum(map(len, self.documents[:at])) for at in range(len(self.documents))]

    @property
    def asked_at(self) -> list[int]:
        """The index of each question's key, where the model says the answer."""
        end = 1 + sum(map(len, self.documents))
        return list(range(end + 1, end + len(self.questions), 2))

    @property
    def answers(self) -> list[int]:
        """The value of each question."""
        return self.questions[2::2]


@dataclass(slots=True)
class _Writer:
    """Writes a prompt's documents one after another."""

    chance: random.Random
    aliases: deque[int]
    keys: deque[int]
    earlier: list[tuple[int, int]] = field(default_factory=list)
    """Aliases and values that documents before this one defined."""
    facts: list[tuple[int, int, Kind]] = field(default_factory=list)
    """Key, value and kind of all statements that can be asked about."""
    meanings: dict[int, int] = field(default_factory=dict)

    def document(self, kinds: Sequence[Kind], start: int) -> list[int]:
        """Returns the tokens of a document at index ``start`` with statements of these kinds, in order."""
        tokens, own, linked = [SEP], list[tuple[int, int]](), list[tuple[int, int]]()
        sources = {Kind.CROSS: self.earlier, Kind.FAR: linked, Kind.WITHIN: own}
        for kind in kinds:
            at, value = start + len(tokens), self.chance.randrange(VALUES)
            if kind is Kind.DEFINE:
                own.append((self.aliases.popleft(), value))
                token = DEFINE + own[-1][0] * VALUES + value
            elif kind is Kind.LINK:
                alias, self.meanings[at] = self.chance.choice(self.earlier)
                linked.append((self.aliases.popleft(), self.meanings[at]))
                token = LINK + linked[-1][0] * ALIASES + alias
            elif kind is Kind.FILLER:
                token = FILLER + self.chance.randrange(FILLERS)
            else:
                key = self.keys.popleft()
                token = LITERAL + key * VALUES + value
                if kind is not Kind.LITERAL:
                    alias, value = self.chance.choice(sources[kind])
                    token, self.meanings[at] = REFER + key * ALIASES + alias, value
                self.facts.append((key, value, kind))
            tokens.append(token)
        self.earlier += own
        return tokens


def sample(chance: random.Random, shape: Shape) -> Prompt:
    """Returns a prompt; the same state of ``chance`` gives the same one."""
    aliases, keys = list(range(ALIASES)), list(range(KEYS))
    chance.shuffle(aliases)
    chance.shuffle(keys)
    writer = _Writer(chance, deque(aliases), deque(keys))
    documents = [
        writer.document(_ordered(chance, shape, number > 0), 1 + number * shape.document_tokens)
        for number in range(shape.documents)
    ]
    picked = _picked(chance, writer.facts, shape.questions)
    questions = [ASK, *(token for key, value, _ in picked for token in (QUESTION + key, value))]
    return Prompt(documents, questions, [kind for _, _, kind in picked], writer.meanings)


def _ordered(chance: random.Random, shape: Shape, has_earlier: bool) -> list[Kind]:
    """Returns the kinds of a document's statements; what others of the document refer to stands before them."""
    needing = [Kind.CROSS] * shape.cross + [Kind.LINK] * shape.link + [Kind.FAR] * shape.far
    kinds = [Kind.DEFINE] * shape.define + [Kind.WITHIN] * shape.within + [Kind.LITERAL] * shape.literal
    kinds += [Kind.FILLER] * shape.filler + (needing if has_earlier else [Kind.FILLER] * len(needing))
    chance.shuffle(kinds)
    for source, user in ((Kind.DEFINE, Kind.WITHIN), (Kind.LINK, Kind.FAR)):
        if user in kinds and (first := kinds.index(source)) > (early := kinds.index(user)):
            kinds[early], kinds[first] = source, user
    return kinds


def _picked(chance: random.Random, facts: list[tuple[int, int, Kind]], count: int) -> list[tuple[int, int, Kind]]:
    """Returns statements to ask about: of each kind in turn."""
    chance.shuffle(facts)
    by = [[each for each in facts if each[2] is kind] for kind in ASKED]
    turns = [each for row in range(len(facts)) for group in by for each in group[row : row + 1]]
    picked = turns[:count]
    chance.shuffle(picked)
    return picked


# Training, from a seed, on one thread: a minute of CPU for one hop.
# Targets are at the token itself: at a question, its answer; at a reference, the value after it. The second makes the
# model resolve references where it reads them, as language models do, and not only at the question.


IGNORED = -100
WARM_UP = 50
COOL_DOWN = 60
"""Steps at the end of the last stage in which the learning rate falls to nothing. Other stages end so much earlier."""
SMOOTH = 0.05
ATTEMPTS = 3
PROMISING = 0.9
"""Running accuracy at the end of the first stage below which a model begins anew."""


@dataclass(frozen=True, slots=True)
class Stage:
    """At most ``steps`` batches of one shape; ends early once the running accuracy is ``enough``."""

    steps: int
    shape: Shape
    enough: float
    batch: int = 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train a model, and the shape of the prompts to test it on."""

    stages: tuple[Stage, ...]
    rate: float = 3e-3
    layers: int = 6
    width: int = 128

    @property
    def shape(self) -> Shape:
        """The shape of the last stage."""
        return self.stages[-1].shape


ONE_HOP = Recipe(
    (
        Stage(800, Shape(documents=2, define=3, within=2, literal=2, filler=1, questions=8), 0.97),
        Stage(500, Shape(filler=4), 0.985),
    )
)
"""References to a definition in an earlier document."""
TWO_HOPS = Recipe(
    (
        Stage(360, Shape(documents=2, define=3, cross=2, within=1, literal=1, filler=1, link=2, far=3), 0.97),
        Stage(600, Shape(define=3, cross=2, literal=2, filler=4, link=1, far=2), 0.985),
    )
)
"""The same, and references to an alias that stands for one of an earlier document."""

Progress = Callable[[int, float, float], None]
"""Gets step, loss and running accuracy."""


def trained(recipe: Recipe, seed: int, report: Progress = lambda *_: None) -> Any:
    """Returns the model that ``recipe`` gives from ``seed``, in evaluation mode.

    Some beginnings never learn the second hop, because questions look at references before those are resolved: they
    begin anew.
    """
    beginning, last = seed, seed + 1_000 * (ATTEMPTS - 1)
    model = fresh(recipe, beginning)
    while not _learns(recipe, model, random.Random(beginning), report, must=beginning == last):
        beginning += 1_000
        model = fresh(recipe, beginning)
    return model.eval()


def _learns(recipe: Recipe, model: Any, chance: random.Random, report: Progress, *, must: bool) -> bool:
    """Trains a model; False as soon as the first stage has ended without promise, unless it ``must`` go on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
    step = 0
    for stage in recipe.stages:
        running, left = 0.0, COOL_DOWN if stage is recipe.stages[-1] else 0
        for at in range(stage.steps):
            step += 1
            cooling = running >= stage.enough or stage.steps - at <= COOL_DOWN
            if cooling and not left:
                break
            left -= cooling
            share = min(1.0, step / WARM_UP) * (
                0.5 + 0.5 * math.cos(math.pi * (1 - left / COOL_DOWN)) if cooling else 1
            )
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * share
            loss, right = _step(model, optimizer, chance, stage)
            running += 0.0 if cooling else SMOOTH * (right - running)
            report(step, loss, right)
        if stage is recipe.stages[0] and running < PROMISING and not must:
            return False
    return True


def fresh(recipe: Recipe, seed: int) -> Any:
    """Returns an untrained model. The embedding of a statement begins as the sum of those of its parts."""
    torch.manual_seed(seed)
    width = recipe.width
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width // 2,
        num_hidden_layers=recipe.layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=8192,
        initializer_range=0.08,
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    key, alias, value, kind = (torch.randn(count, width) for count in (KEYS, ALIASES, VALUES, 5))
    rows = model.model.embed_tokens.weight.data
    for at, parts in (
        (0, value + kind[0]),
        (DEFINE, _pairs(alias, value) + 0.5 * kind[1]),
        (LITERAL, _pairs(key, value) + 0.5 * kind[2]),
        (REFER, _pairs(key, alias) + 0.5 * kind[3]),
        (LINK, _pairs(alias, 0.7 * alias) + 0.5 * kind[4]),
        (QUESTION, key),
    ):
        rows[at : at + len(parts)] = 0.6 * parts
    return model


def _pairs(one: Any, other: Any) -> Any:
    return (one[:, None] + other[None]).flatten(0, 1)


def _step(model: Any, optimizer: Any, chance: random.Random, stage: Stage) -> tuple[float, float]:
    """Trains on one batch; returns the loss, and the lowest accuracy: of answers, of far ones, or of references."""
    prompts = [sample(chance, stage.shape) for _ in range(stage.batch)]
    ids = torch.tensor([prompt.ids for prompt in prompts])
    labels = torch.full_like(ids, IGNORED)
    asked, far = (torch.zeros_like(ids, dtype=torch.bool) for _ in range(2))
    for row, prompt in enumerate(prompts):
        asked[row, prompt.asked_at] = True
        far[row, [at for at, kind in zip(prompt.asked_at, prompt.kinds, strict=True) if kind is Kind.FAR]] = True
        labels[row, prompt.asked_at] = torch.tensor(prompt.answers)
        labels[row, list(prompt.meanings)] = torch.tensor(list(prompt.meanings.values()))
    marked = labels != IGNORED
    logits = model.lm_head(model.model(ids, use_cache=False).last_hidden_state[marked])
    loss = functional.cross_entropy(logits, labels[marked])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    right = (logits.argmax(-1) == labels[marked]).float()
    parts = [right[mask[marked]] for mask in (asked, ~asked, far)]
    return float(loss.detach()), min(float(part.mean()) for part in parts if len(part))


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

    tally: RuleFigures
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
    found = [Scored(RuleFigures(verdict), score) for verdict, score in plans]
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
        ("outcome", "tried", "work, facts", "lost %, facts", "agreement %, facts", "KL, facts", *COLUMNS),
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
    scored = Scored(RuleFigures(EVERYTHING))
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
