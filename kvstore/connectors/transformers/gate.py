"""The gate: tries rules, check layers and ratios on a user's prompts, and picks the cheapest that holds the bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.connectors.transformers.comparing import Case, LayerError, Tally, by_layer, prepare
from kvstore.connectors.transformers.decoder import Decoder
from kvstore.connectors.transformers.splitting import Split
from kvstore.errors import InvalidRequest
from kvstore.segments import Bounds, Measured, Rule, Verdict

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
LAYERS_PROMPTS_MAX = 8
"""Prompts on which the errors of each layer are taken."""


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
    layers: list[LayerError]
    """The errors of each layer with ``verdict``."""
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
        wave = [Tally(each) for each in tries[at : at + AT_ONCE]]
        _measure(decoder, split.searched, wave, strict)
        found = [replace(each.verdict, measured=each.measured()) for each in wave]
        tried += found
        moved(len(wave))
        best = next((each for each in found if each.measured.holds(strict)), None)
        if best is not None:
            break
    verdict = _closed(tried) if best is None else _reported(decoder, split.held_out, best)
    some = [prepare(decoder, case) for case in split.held_out[:LAYERS_PROMPTS_MAX]]
    layers = by_layer(decoder, some, verdict)
    return Choice(verdict, tried, layers, best is not None, len(split.searched), len(split.held_out))


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
    tally = Tally(chosen)
    for case in cases:
        tally.add(decoder, prepare(decoder, case))
    return replace(chosen, measured=tally.measured())


def _closed(tried: Sequence[Verdict]) -> Verdict:
    """Returns the nearest of those that did not hold, as a verdict that says so: with the bounds for a choice."""
    nearest = min(tried, key=lambda each: each.measured.kl)
    return replace(nearest, bounds=tightened(nearest.bounds))


def _measure(decoder: Decoder, cases: Sequence[Case], wave: Sequence[Tally], bounds: Bounds) -> None:
    """Runs each of ``wave`` on all prompts, or until it cannot hold the bounds any more."""
    live = list(wave)
    for case in cases:
        prepared = prepare(decoder, case)
        for tally in live:
            tally.add(decoder, prepared)
        live = [each for each in live if not each.is_lost(bounds, cases)]
        if not live:
            return
