"""The gate: tries rules, check layers and ratios on a user's prompts, and picks the cheapest that holds the bounds."""

from __future__ import annotations

import functools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from kvstore.connectors.transformers.decoder import Decoder, PromptKV, Score, alone, deviation, recompute
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest
from kvstore.segments import Bounds, Measured, Rule, Verdict

# Compares blended and full prefill of the same prompt: answers, top-1 agreement and KL.


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
class RuleFigures:
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


# Prompts that a user gives to compare on: a file of JSON lines, and the answers that the model itself gives.


LINE_BYTES_MAX = 16 << 20
PROMPTS_MAX = 10_000
Encode = Callable[[str], Sequence[int]]
FORM = (
    '{"system": ..., "documents": [..., ...], "question": ..., "answer": ..., "kind": ...}, "kind" a text, the others '
    "texts or lists of token ids"
)


def load_model(name: str, device: str) -> tuple[Any, Encode]:
    """Returns a model by its name or folder, ready to run, and its tokenizer's function. Raises InvalidRequest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    except (OSError, ValueError, RuntimeError, ImportError) as cause:
        raise InvalidRequest(f"cannot load the model {name!r}: {_first_line(cause)}") from cause

    @functools.cache
    def tokenizer() -> Any:
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, ImportError) as cause:
            raise InvalidRequest(
                f"cannot load the tokenizer of {name!r}: {_first_line(cause)}; or give token ids"
            ) from cause

    def encode(text: str) -> Sequence[int]:
        found: Sequence[int] = tokenizer().encode(text, add_special_tokens=False)
        return found

    return model, encode


def read_cases(path: str, model: Any, encode: Encode, *, chunk_tokens: int, answer_tokens: int) -> list[Case]:
    """Reads prompts, one JSON object a line: ``FORM``; "system", "answer" and "kind" may be left out.

    The prompt is BOS, system, documents, question, answer. Segments are the documents, except one that directly
    follows BOS, cut to full chunks. Without an answer, it is what full prefill says: ``answer_tokens`` tokens.
    Raises InvalidRequest, naming the line.
    """
    bos = getattr(model.config, "bos_token_id", None)
    if not isinstance(bos, int):
        raise InvalidRequest("the model has no BOS token, behind which segments are computed")
    found, number = list[Case](), 0
    try:
        with open(path, "rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if line.strip():
                    found.append(_case(line, bos, encode, chunk_tokens, lambda ids: _said(model, ids, answer_tokens)))
                if len(found) > PROMPTS_MAX:
                    raise InvalidRequest(f"more than {PROMPTS_MAX} prompts")
    except OSError as cause:
        raise InvalidRequest(f"cannot read the prompts {path!r}: {cause.strerror}") from cause
    except InvalidRequest as cause:
        raise InvalidRequest(f"prompts {path!r}, line {number}: {cause}") from cause
    if not any(each.segments for each in found):
        raise InvalidRequest(
            f"prompts {path!r}: no document of {chunk_tokens} tokens or more behind a system prompt or another document"
        )
    return found


def _case(line: bytes, bos: int, encode: Encode, chunk_tokens: int, said: Callable[[list[int]], list[int]]) -> Case:
    if len(line) > LINE_BYTES_MAX:
        raise InvalidRequest(f"longer than {LINE_BYTES_MAX} bytes")
    try:
        record = parse_json(line)
    except ValueError as cause:
        raise InvalidRequest(f"not JSON: {cause}") from cause
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("documents"), list)
        or "question" not in record
        or not isinstance(record.get("kind", ""), str)
    ):
        raise InvalidRequest(f"expected {FORM}")
    ids, segments = [bos, *_tokens(record.get("system", []), encode)], list[range]()
    for document in record["documents"]:
        tokens = _tokens(document, encode)
        full = len(tokens) // chunk_tokens * chunk_tokens
        if full and len(ids) > 1:
            segments.append(range(len(ids), len(ids) + full))
        ids += tokens
    ids += _tokens(record["question"], encode)
    answer = _tokens(record["answer"], encode) if "answer" in record else said(ids)
    place = range(len(ids), len(ids) + len(answer))
    return Case((*ids, *answer), tuple(segments), (place,), (record.get("kind", ""),))


def _tokens(value: Any, encode: Encode) -> list[int]:
    if isinstance(value, str):
        return list(encode(value))
    if isinstance(value, list) and all(type(each) is int and each >= 0 for each in value):
        return value
    raise InvalidRequest(f"expected {FORM}")


def _said(model: Any, ids: list[int], count: int) -> list[int]:
    """Returns the model's own continuation: the most likely tokens behind full prefill."""
    given = torch.tensor([ids], device=model.get_input_embeddings().weight.device)
    out = model.generate(given, max_new_tokens=count, do_sample=False)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# Which prompts a rule is chosen by, and which others its figures come from.
#
# A rule that is the cheapest to hold on some prompts looks better on them than it is: it was chosen for that. So the
# verdict reports on prompts that had no part in the choice.


SEED = 22
"""Seed of the split: the same prompts in the same order are split alike."""
PROMPTS_MIN = 10
"""Prompts that are split; fewer say nothing about others."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two halves of the prompts that were given, each with questions of all kinds."""

    searched: list[Case]
    """Those that a rule is chosen by; one more if the number is odd."""
    held_out: list[Case]
    """Those that the verdict reports on."""

    @classmethod
    def of(cls, cases: Sequence[Case], seed: int = SEED) -> Split:
        """Deals the prompts in an order by ``seed``, those with the same kinds of questions in turn to either half.

        Raises InvalidRequest for fewer than PROMPTS_MIN prompts, or if a half has no question of some kind.
        """
        if len(cases) < PROMPTS_MIN:
            raise InvalidRequest(
                f"{len(cases)} prompts are too few: expected {PROMPTS_MIN} or more, half of them to choose a rule by "
                "and half to report on; use some hundreds for bounds of a few percent"
            )
        alike = defaultdict[tuple[str, ...], list[Case]](list)
        for case in random.Random(seed).sample(cases, len(cases)):
            alike[tuple(sorted(set(case.kinds)))].append(case)
        dealt = [case for kinds in sorted(alike) for case in alike[kinds]]
        found = cls(dealt[::2], dealt[1::2])
        lacking = _kinds(found.searched) ^ _kinds(found.held_out)
        if lacking:
            raise InvalidRequest(
                f"questions of kind {min(lacking)!r} are in too few prompts to choose by some and report on others: "
                "expected 2 or more with the same kinds"
            )
        return found


def _kinds(cases: Sequence[Case]) -> set[str]:
    return {kind for case in cases for kind in case.kinds}


RATIOS = (0.02, 0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
FALL = (2.0, 1.5, 1.0)
"""A gradual schedule: multiples of its last ratio at three layers in a row (CacheBlend, section 4.3)."""
FALLING_MAX = 0.30
"""The largest last ratio of a gradual schedule: above, its first ratios are near everything."""
RULES = (Rule.V, Rule.BOTH, Rule.K)
"""In the order in which equally cheap ones are tried."""
AT_ONCE = 8
"""Candidates that one pass over the prompts tries. Each pass prefills every prompt in full, and its segments alone."""
UNMEASURED = Measured(prompts=0, tokens=0, agreement=0.0, kl=0.0, answers_lost=0.0, work=0.0)
MARGIN = 0.5
"""Share of what the bounds allow that a rule may use on the prompts to choose by."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of a search."""

    verdict: Verdict
    """The cheapest that held on the prompts to choose by, with what was measured on the others: it opens the gate only
    if it holds the bounds there too. If none held, the one with the least KL, with the bounds that it did not hold.
    """
    tried: list[Verdict]
    """All that were tried, in order, with what was measured on the prompts to choose by until they could not hold any
    more.
    """
    is_chosen: bool
    """True if a rule held on the prompts to choose by."""
    searched: int
    """Prompts to choose by."""
    held_out: int
    """Prompts that ``verdict`` reports on."""


def candidates(layers: int, fingerprint: str, rope: str, bounds: Bounds) -> list[Verdict]:
    """Returns everything to try on a model with so many layers, unmeasured, the cheapest first."""
    first_checks = sorted({each for each in (1, 2, 3, layers // 4, layers // 2) if 0 < each < layers})
    schedules: list[tuple[tuple[int, ...], tuple[float, ...]]] = [
        ((first,), (ratio,)) for first in first_checks for ratio in RATIOS
    ]
    schedules += [
        (tuple(range(first, first + len(FALL))), tuple(round(ratio * each, 4) for each in FALL))
        for first in first_checks
        for ratio in RATIOS
        if first + len(FALL) <= layers and ratio <= FALLING_MAX
    ]
    affordable = [each for each in schedules if work(layers, *each) <= bounds.work_max]
    return [
        Verdict(fingerprint, rope, rule, *each, bounds, UNMEASURED)
        for each in sorted(affordable, key=lambda each: work(layers, *each))
        for rule in RULES
    ]


def work(layers: int, check_layers: Sequence[int], ratios: Sequence[float]) -> float:
    """Returns the share of reused rows times layers that a schedule computes."""
    by_check = dict(zip(check_layers, ratios, strict=True))
    share, total = 1.0, 0.0
    for layer in range(layers):
        share = by_check.get(layer, share)
        total += share
    return total / layers


def choose(
    decoder: Decoder,
    cases: Sequence[Case],
    tries: Sequence[Verdict],
    bounds: Bounds,
    moved: Callable[[int], None] = lambda _: None,
) -> Choice:
    """Measures ``tries`` on half of the prompts, the cheapest first, until one holds; then that one on the other half.

    To be chosen, a rule may use only the share MARGIN of what ``bounds`` allow to be lost: the cheapest that just holds
    on some prompts would often not hold on others. ``moved`` is called with 1 for each of ``tries`` that is decided.
    Raises InvalidRequest without tries, or as ``Split.of``.
    """
    if not tries:
        raise InvalidRequest("nothing to compare: expected bounds that leave something to try")
    split, strict = Split.of(cases), tightened(bounds)
    tried: list[Verdict] = []
    best: Verdict | None = None
    for at in range(0, len(tries), AT_ONCE):
        wave = [RuleFigures(each) for each in tries[at : at + AT_ONCE]]
        _measure(decoder, split.searched, wave, strict)
        found = [replace(each.verdict, measured=each.measured()) for each in wave]
        tried += found
        moved(len(wave))
        best = next((each for each in found if each.measured.holds(strict)), None)
        if best is not None:
            break
    verdict = _closed(tried) if best is None else _reported(decoder, split.held_out, best)
    return Choice(verdict, tried, best is not None, len(split.searched), len(split.held_out))


def tightened(bounds: Bounds) -> Bounds:
    """Returns the bounds that a rule must hold to be chosen; that on work is the same."""
    return Bounds(
        1 - MARGIN * (1 - bounds.agreement_min),
        MARGIN * bounds.kl_max,
        MARGIN * bounds.answers_lost_max,
        bounds.work_max,
    )


def _reported(decoder: Decoder, cases: Sequence[Case], chosen: Verdict) -> Verdict:
    """Returns the choice with its figures on prompts that had no part in it, all of them."""
    tally = RuleFigures(chosen)
    for case in cases:
        tally.add(decoder, prepare(decoder, case))
    return replace(chosen, measured=tally.measured())


def _closed(tried: Sequence[Verdict]) -> Verdict:
    """Returns the nearest of those that did not hold, as a verdict that says so: with the bounds for a choice."""
    nearest = min(tried, key=lambda each: each.measured.kl)
    return replace(nearest, bounds=tightened(nearest.bounds))


def _measure(decoder: Decoder, cases: Sequence[Case], wave: Sequence[RuleFigures], bounds: Bounds) -> None:
    """Runs each of ``wave`` on all prompts, or until it cannot hold the bounds any more."""
    live = list(wave)
    for case in cases:
        prepared = prepare(decoder, case)
        for tally in live:
            tally.add(decoder, prepared)
        live = [each for each in live if not each.is_lost(bounds, cases)]
        if not live:
            return
