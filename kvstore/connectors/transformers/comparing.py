"""Blended prefill beside full prefill of the same prompt: answers, top-1 agreement, KL, and the KV of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from kvstore.connectors.transformers.decoder import Decoder, PromptKV
from kvstore.connectors.transformers.selective import Score, alone, deviation, recompute
from kvstore.errors import InvalidRequest
from kvstore.segments import Bounds, Measured, Verdict


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt to compare on. All indices count from its start."""

    ids: tuple[int, ...]
    """All tokens, those of the answers included; BOS first."""
    segments: tuple[range, ...]
    """The parts that are reused: ascending, without overlap, behind BOS."""
    answers: tuple[range, ...]
    """The tokens of each answer, behind the last segment: the logits before each are compared."""
    kinds: tuple[str, ...] = ()
    """The kind of question of each answer: the bound on lost answers holds for each kind. By default one kind, ""."""

    def __post_init__(self) -> None:
        ends = [1, *(each.stop for each in self.segments)]
        starts = [*(each.start for each in self.segments), len(self.ids)]
        if any(start < end for start, end in zip(starts, ends, strict=True)):
            raise InvalidRequest(
                f"segments {self.segments} of {len(self.ids)} tokens: expected them behind BOS, in order"
            )
        if not self.answers or any(not ends[-1] < each.start < each.stop <= len(self.ids) for each in self.answers):
            raise InvalidRequest(f"answers {self.answers}: expected them behind a question, behind the last segment")
        if not self.kinds:
            object.__setattr__(self, "kinds", ("",) * len(self.answers))
        if len(self.kinds) != len(self.answers):
            raise InvalidRequest(f"kinds {self.kinds} of {len(self.answers)} answers: expected one for each")

    @property
    def asked(self) -> list[int]:
        """The index before each answer token."""
        return [index - 1 for each in self.answers for index in each]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with everything that does not depend on the rule."""

    case: Case
    full: PromptKV
    loaded: PromptKV
    """KV of the segments, each computed alone and moved to its place; full prefill's before the first segment."""
    reused: Any
    """A vector of booleans: the rows that segments gave."""
    exact: int
    """Leading rows before the first segment."""
    chances: Any
    """Log-probabilities of full prefill at ``case.asked``, of shape (asked, vocabulary)."""

    def blended(
        self, decoder: Decoder, verdict: Verdict, score: Score = deviation
    ) -> tuple[PromptKV, Any, Sequence[int]]:
        """Returns KV and log-probabilities of a blended prefill, and the number of reused rows computed by layer."""
        kv = PromptKV([each.clone() for each in self.loaded.keys], [each.clone() for each in self.loaded.values])
        ids = torch.tensor(self.case.ids, device=decoder.device)
        ran = recompute(decoder, ids, kv, self.reused, verdict, exact=self.exact, score=score)
        at = torch.searchsorted(ran.rows, torch.tensor(self.case.asked, device=decoder.device))
        return kv, _chances(decoder, ran.hidden[:, at]), ran.computed


def prepare(decoder: Decoder, case: Case) -> Prepared:
    """Prefills the whole prompt, and each of its segments alone behind BOS."""
    ids = torch.tensor(case.ids, device=decoder.device)
    rows = torch.arange(len(ids), device=decoder.device)
    full, nothing = decoder.empty(len(ids)), torch.zeros(len(ids), dtype=torch.bool, device=decoder.device)
    chances = _chances(decoder, recompute(decoder, ids, full, nothing, None).hidden[:, case.asked])
    loaded = PromptKV([each.clone() for each in full.keys], [each.clone() for each in full.values])
    reused = nothing.clone()
    for each in case.segments:
        place = rows[each.start : each.stop]
        reused[place] = True
        for layer, (k, v) in enumerate(alone(decoder, torch.cat((ids[:1], ids[place])))):
            loaded.write(layer, place, decoder.rotate(layer, k[1:], place), v[1:])
    exact = case.segments[0].start if case.segments else len(ids)
    return Prepared(case, full, loaded, reused, min(exact, len(ids) - 1), chances)


@dataclass(slots=True)
class Tally:
    """Figures of one rule over the prompts so far."""

    verdict: Verdict
    prompts: int = 0
    reused: int = 0
    computed: float = 0.0
    """Reused rows computed, in whole runs through all layers."""
    asked: int = 0
    agreed: int = 0
    kl_sum: float = 0.0
    right: Counter[str] = field(default_factory=Counter)
    """Answers that full prefill gives right, by kind of question."""
    lost: Counter[str] = field(default_factory=Counter)
    """Answers that full prefill gives right and blended prefill gives wrong, by kind of question."""

    def add(self, decoder: Decoder, prepared: Prepared, score: Score = deviation) -> list[int]:
        """Runs one prompt. Returns the most likely token at each place of ``Case.asked``."""
        _, chances, computed = prepared.blended(decoder, self.verdict, score)
        best, full_best = chances.argmax(-1), prepared.chances.argmax(-1)
        self.prompts += 1
        self.reused += int(prepared.reused.sum())
        self.computed += sum(computed) / len(computed)
        self.asked += len(best)
        self.agreed += int((best == full_best).sum())
        self.kl_sum += float(functional.kl_div(chances, prepared.chances, log_target=True, reduction="sum"))
        case = prepared.case
        for kind, given, full_given in zip(case.kinds, _given(case, best), _given(case, full_best), strict=True):
            self.right[kind] += full_given
            self.lost[kind] += full_given and not given
        said: list[int] = best.tolist()
        return said

    def measured(self) -> Measured:
        """Returns the figures of a verdict."""
        return Measured(
            self.prompts,
            self.reused,
            self.agreed / max(1, self.asked),
            max(0.0, self.kl_sum / max(1, self.asked)),
            max((self.lost[kind] / max(1, right) for kind, right in self.right.items()), default=0.0),
            self.computed / max(1, self.reused),
        )

    def is_lost(self, bounds: Bounds, cases: Sequence[Case]) -> bool:
        """True if the bounds cannot hold for all of ``cases`` any more, however the rest of them turns out."""
        asked, answers = sum(len(each.asked) for each in cases), Counter(kind for each in cases for kind in each.kinds)
        return (
            self.asked - self.agreed > (1 - bounds.agreement_min) * asked
            or self.kl_sum > bounds.kl_max * asked
            or any(lost > bounds.answers_lost_max * answers[kind] for kind, lost in self.lost.items())
        )


@dataclass(slots=True)
class LayerError:
    """Squared errors of reused rows in one layer, beside full prefill; ``share`` is the part of them computed."""

    share: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("k", "v", "k loaded", "v loaded"), 0.0))
    norms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("k", "v"), 0.0))

    def relative(self, name: str) -> float:
        """Returns the root of squared errors over squared values: of "k", "v", or of either as ``loaded``."""
        return float((self.sums[name] / max(self.norms[name[0]], 1e-30)) ** 0.5)


def by_layer(decoder: Decoder, prepared: Sequence[Prepared], verdict: Verdict) -> list[LayerError]:
    """Returns for each layer how far K and V of reused rows are from full prefill, as loaded and as blended."""
    found = [LayerError() for _ in range(decoder.layers)]
    for each in prepared:
        kv, _, computed = each.blended(decoder, verdict)
        rows = each.reused.nonzero()[:, 0]
        for layer, errors in enumerate(found):
            errors.share += computed[layer] / max(1, len(rows)) / len(prepared)
            whole = each.full.at(layer, rows)
            for name, one, loaded, exact in zip(
                "kv", kv.at(layer, rows), each.loaded.at(layer, rows), whole, strict=True
            ):
                errors.norms[name] += _squares(exact)
                errors.sums[name] += _squares(one - exact)
                errors.sums[f"{name} loaded"] += _squares(loaded - exact)
    return found


def _squares(values: Any) -> float:
    return float((values.float() ** 2).sum())


def _chances(decoder: Decoder, hidden: Any) -> Any:
    with torch.no_grad():
        return decoder.logits(hidden).float().log_softmax(-1)


def _given(case: Case, best: Any) -> list[bool]:
    """Returns for each answer whether all its tokens are the most likely ones."""
    said, found, at = best.tolist(), [], 0
    for each in case.answers:
        found.append(said[at : at + len(each)] == list(case.ids[each.start : each.stop]))
        at += len(each)
    return found
