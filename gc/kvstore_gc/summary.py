"""What one round did, in numbers: for the log, for ``--json``, for metrics and for the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.namespace import Namespace
from kvstore_gc.execute import SweepReport
from kvstore_gc.histogram import Tally
from kvstore_gc.plan import SweepPlan
from kvstore_gc.survey import Survey


@dataclass(frozen=True, slots=True)
class Example:
    """One chunk that would be condemned, and why."""

    address: str
    namespace: str
    reason: str
    size_bytes: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Explained:
    """Why one chunk is kept or condemned; times as ``plan.Verdict`` has them."""

    address: str
    namespace: str
    reason: str
    goes: bool
    idle_s: float
    weighted_s: float
    cutoff_s: float | None


@dataclass(slots=True)
class NamespaceSummary:
    """What a namespace had, and what of it was chosen, by reason."""

    id: str
    tenant: str | None = None
    name: str | None = None
    scanned: Tally = field(default_factory=Tally)
    chosen: dict[str, Tally] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As printed."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "name": self.name,
            "scanned": _json(self.scanned),
            "chosen": {reason: _json(tally) for reason, tally in self.chosen.items()},
        }


@dataclass(slots=True)
class Summary:
    """One round. ``chosen`` is what the plan took, ``condemned`` what was still so when it was looked at again,

    ``reaped`` what is deleted; ``spared`` counts the chunks in between by why.
    """

    dry_run: bool
    started_s: float
    shards_count: int
    shards_mine_count: int = 0
    namespaces: dict[str, NamespaceSummary] = field(default_factory=dict)
    scanned: Tally = field(default_factory=Tally)
    kept: dict[str, Tally] = field(default_factory=dict)
    chosen: dict[str, Tally] = field(default_factory=dict)
    condemned: Tally = field(default_factory=Tally)
    reaped: Tally = field(default_factory=Tally)
    spared: Counter[str] = field(default_factory=Counter)
    sweeps: Counter[str] = field(default_factory=Counter)
    """begun, adopted, abandoned (closed without taking anything), left (in flight, for the next round)."""
    orphans: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    used_before_bytes: int = 0
    used_after_bytes: int = 0
    beside: Tally = field(default_factory=Tally)
    """Files that are no chunks and take room of the capacity as well: staged, in trash, set aside."""
    capacity_bytes: int | None = None
    limit_bytes: int | None = None
    """The smallest ``--max-bytes`` of all collectors that are there; None where none has one."""
    high_bytes: int | None = None
    low_bytes: int | None = None
    unfinished: list[str] = field(default_factory=list)
    """What the round had to do and could not, in words."""
    examples: list[Example] = field(default_factory=list)
    """Of a dry run: the longest unused of what it would condemn."""
    explained: list[Explained] = field(default_factory=list)
    """Of a dry run: what was asked for by address."""

    def surveyed(self, found: Survey, used_bytes: int, namespaces: Sequence[Namespace]) -> None:
        """Notes what was found, and all that is used; ``namespaces`` are those whose names are known."""
        self.scanned = found.used
        self.used_before_bytes = self.used_after_bytes = used_bytes
        known = {each.id: each for each in namespaces}
        for namespace, tally in found.namespaces.items():
            record = known.get(namespace)
            tenant, name = (record.tenant, record.name) if record else (None, None)
            self.namespaces[namespace.hex()] = NamespaceSummary(namespace.hex(), tenant, name, tally)

    def planned(self, plan: SweepPlan) -> None:
        """Counts what a plan takes."""
        for victim in plan.victims:
            one, reason, id_ = Tally(1, victim.size_bytes), victim.reason.value, victim.namespace.hex()
            namespace = self.namespaces.setdefault(id_, NamespaceSummary(id_))
            for counts in (self.chosen, namespace.chosen):
                counts[reason] = counts.get(reason, Tally()) + one

    def swept(self, report: SweepReport) -> None:
        """Adds what came of some sweeps."""
        self.condemned += Tally(report.condemned_count, report.condemned_bytes)
        self.reaped += Tally(report.reaped_count, report.reaped_bytes)
        self.spared += report.kept
        self.sweeps["begun"] += report.sweeps_count
        self.sweeps["adopted"] += report.adopted_count
        self.sweeps["abandoned"] += report.abandoned_count
        self.sweeps["left"] += report.left_count
        for phase, seconds in report.seconds.items():
            self.spent(phase, seconds)

    def spent(self, phase: str, seconds: float) -> None:
        """Adds to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "dry_run": self.dry_run,
            "started_s": round(self.started_s, 3),
            "shards": {"total": self.shards_count, "mine": self.shards_mine_count},
            "scanned": _json(self.scanned),
            "kept": {reason: _json(tally) for reason, tally in self.kept.items()},
            "chosen": {reason: _json(tally) for reason, tally in self.chosen.items()},
            "condemned": _json(self.condemned),
            "reaped": _json(self.reaped),
            "spared": {why: count for why, count in self.spared.items() if count},
            "sweeps": {outcome: self.sweeps[outcome] for outcome in ("begun", "adopted", "abandoned", "left")},
            "orphans": {kind: count for kind, count in self.orphans.items() if count},
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
            "used_bytes_before": self.used_before_bytes,
            "used_bytes_after": self.used_after_bytes,
            "beside": {"files": self.beside.count, "bytes": self.beside.bytes},
            "capacity_bytes": self.capacity_bytes,
            "limit_bytes": self.limit_bytes,
            "high_bytes": self.high_bytes,
            "low_bytes": self.low_bytes,
            "unfinished": self.unfinished,
            "namespaces": [each.to_json() for each in self.namespaces.values()],
            **(self._said_by_dry_run() if self.dry_run else {}),
        }

    def _said_by_dry_run(self) -> dict[str, Any]:
        return {
            "examples": [asdict(each) for each in self.examples],
            "explained": [asdict(each) for each in self.explained],
        }

    def to_line(self) -> str:
        """As logged: one event, key=value."""
        pairs: list[tuple[str, object]] = [
            ("scanned", self.scanned.count),
            ("scanned_bytes", self.scanned.bytes),
            *((f"chosen_{_key(reason)}", tally.count) for reason, tally in self.chosen.items()),
            ("condemned", self.condemned.count),
            ("reaped", self.reaped.count),
            ("reaped_bytes", self.reaped.bytes),
            *((f"spared_{_key(why)}", count) for why, count in self.spared.items() if count),
            *((f"sweeps_{outcome}", count) for outcome, count in self.sweeps.items() if count),
            *((f"orphans_{kind}", count) for kind, count in self.orphans.items() if count),
            ("used_bytes", self.used_after_bytes),
            ("beside_bytes", self.beside.bytes),
            ("capacity_bytes", self.capacity_bytes),
            ("limit_bytes", self.limit_bytes),
            ("seconds", f"{sum(self.seconds.values()):.2f}"),
        ]
        said = " ".join(f"{key}={value}" for key, value in pairs)
        return f"gc.round {said}" + (f" unfinished={'; '.join(self.unfinished)!r}" if self.unfinished else "")


def _json(tally: Tally) -> dict[str, int]:
    return {"chunks": tally.count, "bytes": tally.bytes}


def _key(words: str) -> str:
    return words.replace(" ", "_")
