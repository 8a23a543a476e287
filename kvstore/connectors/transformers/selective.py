"""Selective recomputation (CacheBlend, arXiv 2405.16444, section 4): the reference that an engine can be held against.

Some rows of a prompt have KV that was computed in another context, and is slightly wrong in this one. Up to the first
check layer all rows are computed. At a check layer the rule compares K, V or both of each reused row as computed here
with what was loaded; the rows that deviate most stay, as many as the ratio says. The others keep what was loaded, from
this layer on. Rows without KV (the question, what was not found) always stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.connectors.transformers.decoder import Decoder, PromptKV
from kvstore.segments import Rule, Verdict

Rows = tuple[Any, Any]
"""K and V of rows, each of shape (rows, heads, dim)."""
Score = Callable[[Rule, Rows, Rows], Any]
"""Takes the rule, rows as computed and as loaded; returns a number for each row: the highest are computed on."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The outcome of a run. ``hidden`` are the last layer's states of ``rows``, of shape (1, rows, width)."""

    hidden: Any
    rows: Any
    computed: tuple[int, ...]
    """Reused rows that were computed, in each layer."""
    reused: int
    """All reused rows."""

    @property
    def work(self) -> float:
        """The share of reused rows times layers that was computed, 0 to 1."""
        return sum(self.computed) / max(1, self.reused * len(self.computed))


def deviation(rule: Rule, new: Rows, old: Rows) -> Any:
    """Returns the squared distance of each row's K, V, or both (each divided by its mean)."""
    of_k, of_v = (((one - other).float() ** 2).sum((1, 2)) for one, other in zip(new, old, strict=True))
    if rule is Rule.BOTH:
        return sum(each / each.mean().clamp_min(torch.finfo(each.dtype).tiny) for each in (of_k, of_v))
    return of_k if rule is Rule.K else of_v


def recompute(
    decoder: Decoder,
    ids: Any,
    kv: PromptKV,
    reused: Any,
    verdict: Verdict | None,
    *,
    exact: int = 0,
    score: Score = deviation,
) -> Recomputed:
    """Completes ``kv``, the KV of the prompt ``ids`` (a vector), by the rule, check layers and ratios of ``verdict``.

    ``reused``, a vector of booleans, marks the rows of ``kv`` that were loaded for another context. The leading
    ``exact`` rows were loaded for this one and are not computed; all other rows are. None computes reused rows too.
    """
    ratios = {} if verdict is None else dict(zip(verdict.check_layers, verdict.ratios, strict=True))
    total, computed = int(reused.sum()), []
    rows = torch.arange(exact, len(ids), device=decoder.device)
    with torch.no_grad():
        hidden = decoder.embed(ids[exact:])
        for layer in range(decoder.layers):
            if verdict is not None and layer in ratios:
                asked = reused[rows].nonzero()[:, 0]
                k, v = decoder.project(layer, hidden[:, asked])
                points = score(verdict.rule, (decoder.rotate(layer, k, rows[asked]), v), kv.at(layer, rows[asked]))
                stay = ~reused[rows]
                stay[asked[points.topk(min(round(ratios[layer] * total), len(asked))).indices]] = True
                rows, hidden = rows[stay], hidden[:, stay]
            hidden = decoder.run(layer, hidden, rows, kv)
            computed.append(int(reused[rows].sum()))
    return Recomputed(hidden, rows, tuple(computed), total)


def alone(decoder: Decoder, ids: Any) -> list[Rows]:
    """Prefills ``ids``, a vector, as a prompt of its own; returns K, not rotated, and V of each layer."""
    kv, rows, found = decoder.empty(len(ids)), torch.arange(len(ids), device=decoder.device), []
    with torch.no_grad():
        hidden = decoder.embed(ids)
        for layer in range(decoder.layers):
            found.append(decoder.project(layer, hidden))
            hidden = decoder.run(layer, hidden, rows, kv)
    return found
