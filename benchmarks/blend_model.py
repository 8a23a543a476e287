"""Trains a small model on ``benchmarks.blend_task`` from a seed, on one thread: a minute of CPU for one hop.

Targets stand where the token stands: at a question, its answer; at a reference, the value behind it. The second makes
the model resolve references where it reads them, as language models do, and not only once it is asked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.blend_task import (
    ALIASES,
    BOS,
    DEFINE,
    KEYS,
    LINK,
    LITERAL,
    QUESTION,
    REFER,
    VALUES,
    VOCABULARY,
    Kind,
    Shape,
    sample,
)

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

Told = Callable[[int, float, float], None]
"""Gets step, loss and running accuracy."""


def trained(recipe: Recipe, seed: int, told: Told = lambda *_: None) -> Any:
    """Returns the model that ``recipe`` gives from ``seed``, in evaluation mode.

    Some beginnings never learn the second hop, because questions look at references before those are resolved: they
    begin anew.
    """
    beginning, last = seed, seed + 1_000 * (ATTEMPTS - 1)
    model = fresh(recipe, beginning)
    while not _learns(recipe, model, random.Random(beginning), told, must=beginning == last):
        beginning += 1_000
        model = fresh(recipe, beginning)
    return model.eval()


def _learns(recipe: Recipe, model: Any, chance: random.Random, told: Told, *, must: bool) -> bool:
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
            told(step, loss, right)
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
