"""The gate: a verdict says for one model how blended KV must be recomputed, and what was measured so.

A verdict is a value. ``kvstore blend-check`` makes it and the store keeps it; a read of segments takes it. Without a
verdict that fits, nothing is read.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.core.validate import FLOAT_MAX, brief, kind_of, number, parse_json
from kvstore.errors import InvalidRequest

# The namespaces of segments and of verdicts, derived from a model's exact one (SEGMENTS.md, S2).


KIND, SEGMENT = "kv", "segment"
VERDICT = "verdict"


def segments_of(base: Namespace, rope: str, chunk_tokens: int) -> Namespace:
    """The namespace of a model's segments; ``rope`` is the digest of its RoPE settings."""
    attributes = {
        KIND: SEGMENT,
        "keys": "unrotated",
        "context": "bos",
        "rope": rope,
        "base": base.digest.hex(),
    }
    layout = replace(base.layout, chunk_tokens=chunk_tokens)
    name = f"{base.name} (segments of {chunk_tokens})"
    return Namespace.of(name, layout, base.fingerprint, base.tenant, attributes)


def verdicts_of(segments: Namespace) -> Namespace:
    """The namespace of the verdicts on a model's segments: blocks, without a layout of their own."""
    attributes = {KIND: VERDICT, "segments": segments.digest.hex()}
    layout = Layout(1, 1, 1, "int8", 1)
    return Namespace.of(f"{segments.name} verdicts", layout, segments.fingerprint, segments.tenant, attributes)


def check_exact(attributes: Mapping[str, str] | None) -> None:
    """Raises InvalidRequest if a namespace with these attributes would be one of segments or of verdicts (S5)."""
    if isinstance(attributes, Mapping) and attributes.get(KIND) in (SEGMENT, VERDICT):
        raise InvalidRequest(
            f"attribute {KIND}={attributes[KIND]!r} is for segments, whose KV has another context and unrotated keys: "
            "open the model's own namespace and use cache.segments(rope)"
        )


CHECK_LAYERS_MAX = 1024
VERDICT_BYTES = 64 << 10
"""Bytes of a stored verdict, padded with spaces: blocks of one key have one size."""
VERSION = 1
ROUNDING = 1e-3
"""The divergence of two equal distributions may be this far below 0."""


class Rule(enum.Enum):
    """The deviation by which tokens are chosen for recomputation: of V, of K, or the sum of both, each by its mean."""

    V = "v"
    K = "k"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that blended prefill must hold against full prefill of the same prompts."""

    agreement_min: float = 0.98
    """Least share of tokens whose most likely successor is the same, 0 to 1."""
    kl_max: float = 0.03
    """Largest mean Kullback-Leibler divergence of the blended from the full distribution, in nats."""
    answers_lost_max: float = 0.02
    """Largest share of questions that full prefill answers right and blended prefill answers wrong, of any kind."""
    work_max: float = 1.0
    """Largest work: recomputed rows of all layers, as a share of the reused tokens times layers."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement behind a verdict, on prompts that had no part in its choice. Names are those of ``Bounds``."""

    prompts: int
    tokens: int
    """Reused tokens in all prompts."""
    agreement: float
    kl: float
    answers_lost: float
    """Of the kind of question that loses most; 0 if the prompts had no known answers."""
    work: float

    def holds(self, bounds: Bounds) -> bool:
        """True if the bounds hold, and something was measured."""
        return (
            self.prompts > 0
            and self.agreement >= bounds.agreement_min
            and self.kl <= bounds.kl_max
            and self.answers_lost <= bounds.answers_lost_max
            and self.work <= bounds.work_max
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The rule of recomputation that one model needs, with its measurement.

    At ``check_layers[i]`` (ascending, from 0) the share ``ratios[i]`` of the reused tokens (0 to 1, falling) stays in
    the computation: those that deviate most by ``rule``. All layers before the first check compute all rows.
    ``fingerprint`` is ``Segments.fingerprint`` (the weights), ``rope`` is ``Rope.digest``. Raises InvalidRequest.
    """

    fingerprint: str
    rope: str
    rule: Rule
    check_layers: tuple[int, ...]
    ratios: tuple[float, ...]
    bounds: Bounds
    measured: Measured

    def __post_init__(self) -> None:
        if not self.fingerprint:
            raise InvalidRequest("verdict without a fingerprint: open the namespace with a digest of the weights")
        if not isinstance(self.rule, Rule):
            raise InvalidRequest(f"verdict rule is {self.rule!r}: expected a kvstore.segments.Rule")
        layers, ratios = self.check_layers, self.ratios
        if not 1 <= len(layers) <= CHECK_LAYERS_MAX or len(layers) != len(ratios):
            raise InvalidRequest(
                f"verdict has {len(layers)} check layers and {len(ratios)} ratios: expected one ratio for each of 1 to "
                f"{CHECK_LAYERS_MAX} layers"
            )
        if list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise InvalidRequest(f"verdict check_layers={layers!r}: expected ascending layers from 0")
        if list(ratios) != sorted(ratios, reverse=True) or not 0 <= ratios[-1] <= ratios[0] <= 1:
            raise InvalidRequest(f"verdict ratios={ratios!r}: expected falling shares from 0 to 1")
        for name, given in (*asdict(self.bounds).items(), *asdict(self.measured).items()):
            value, least = number(given), -ROUNDING if name == "kl" else 0.0
            if value is None or not least <= value <= FLOAT_MAX:
                raise InvalidRequest(f"verdict has {name}={brief(given)}: expected a finite number, 0 or more")
        for name in ("agreement", "answers_lost"):
            if getattr(self.measured, name) > 1:
                raise InvalidRequest(f"verdict has {name}={getattr(self.measured, name)}: expected a share, at most 1")

    @property
    def holds(self) -> bool:
        """True if what was measured holds the bounds and opens the gate; a verdict that does not hold closes it."""
        return self.measured.holds(self.bounds)

    def to_json(self) -> bytes:
        """The verdict as canonical JSON."""
        fields = asdict(self) | {"rule": self.rule.value, "version": VERSION}
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Verdict:
        """The inverse of to_json. Raises InvalidRequest where ``text`` is not a verdict of this version."""
        try:
            fields: dict[str, Any] = parse_json(text)
            if fields.pop("version") != VERSION:
                raise InvalidRequest("the verdict is of another version of kvstore: run kvstore blend-check again")
            return cls(
                fingerprint=str(fields["fingerprint"]),
                rope=str(fields["rope"]),
                rule=Rule(fields["rule"]),
                check_layers=tuple(map(int, fields["check_layers"])),
                ratios=tuple(map(float, fields["ratios"])),
                bounds=Bounds(**fields["bounds"]),
                measured=Measured(**fields["measured"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise InvalidRequest(f"not a verdict: {cause}") from cause


def check(verdict: object, fingerprint: str, rope: str) -> Verdict:
    """Returns the verdict if it opens the gate for this model. Raises InvalidRequest, saying why, if it does not."""
    found = check_model(verdict, fingerprint, rope)
    if not found.holds:
        raise InvalidRequest("the verdict's measurement does not hold its bounds: use the exact prefix instead")
    return found


def check_model(verdict: object, fingerprint: str, rope: str) -> Verdict:
    """Returns the verdict if it is one for this model, whether it opens or closes the gate. Raises InvalidRequest."""
    if not isinstance(verdict, Verdict):
        raise InvalidRequest(
            f"verdict is {kind_of(verdict)}: segments are read only with a verdict (kvstore blend-check makes "
            "one, segments.verdict() returns it); use the exact prefix instead"
        )
    if verdict.fingerprint != fingerprint:
        raise InvalidRequest("the verdict is for other weights: run kvstore blend-check for these")
    if verdict.rope != rope:
        raise InvalidRequest("the verdict is for other RoPE settings: run kvstore blend-check for these")
    return verdict
