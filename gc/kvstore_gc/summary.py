"""What one round did, in numbers: for the log, for ``--json``, for metrics and for the exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Amount:
    """Some chunks and their bytes, headers included."""

    chunks: int = 0
    bytes: int = 0

    def add(self, chunks: int, size_bytes: int) -> None:
        """Counts some more."""
        self.chunks += chunks
        self.bytes += size_bytes

    def to_json(self) -> dict[str, int]:
        """As printed."""
        return {"chunks": self.chunks, "bytes": self.bytes}


@dataclass(frozen=True, slots=True)
class Example:
    """One chunk that would be condemned, and why."""

    address: str
    namespace: str
    reason: str
    size_bytes: int
    idle_s: float


@dataclass(slots=True)
class NamespaceSummary:
    """What a namespace had, and what of it was chosen, by reason."""

    id: str
    tenant: str | None = None
    name: str | None = None
    scanned: Amount = field(default_factory=Amount)
    chosen: dict[str, Amount] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As printed."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "name": self.name,
            "scanned": self.scanned.to_json(),
            "chosen": {reason: amount.to_json() for reason, amount in self.chosen.items()},
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
    scanned: Amount = field(default_factory=Amount)
    kept: dict[str, Amount] = field(default_factory=dict)
    chosen: dict[str, Amount] = field(default_factory=dict)
    condemned: Amount = field(default_factory=Amount)
    reaped: Amount = field(default_factory=Amount)
    spared: Counter[str] = field(default_factory=Counter)
    sweeps: Counter[str] = field(default_factory=Counter)
    """begun, adopted, abandoned (closed without taking anything), left (in flight, for the next round)."""
    orphans: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    used_before_bytes: int = 0
    used_after_bytes: int = 0
    capacity_bytes: int | None = None
    high_bytes: int | None = None
    low_bytes: int | None = None
    unfinished: list[str] = field(default_factory=list)
    """What the round had to do and could not, in words."""
    examples: list[Example] = field(default_factory=list)

    def spent(self, phase: str, seconds: float) -> None:
        """Adds to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "dry_run": self.dry_run,
            "started_s": round(self.started_s, 3),
            "shards": {"total": self.shards_count, "mine": self.shards_mine_count},
            "scanned": self.scanned.to_json(),
            "kept": {reason: amount.to_json() for reason, amount in self.kept.items()},
            "chosen": {reason: amount.to_json() for reason, amount in self.chosen.items()},
            "condemned": self.condemned.to_json(),
            "reaped": self.reaped.to_json(),
            "spared": {why: count for why, count in self.spared.items() if count},
            "sweeps": {outcome: self.sweeps[outcome] for outcome in ("begun", "adopted", "abandoned", "left")},
            "orphans": {kind: count for kind, count in self.orphans.items() if count},
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
            "used_bytes_before": self.used_before_bytes,
            "used_bytes_after": self.used_after_bytes,
            "capacity_bytes": self.capacity_bytes,
            "high_bytes": self.high_bytes,
            "low_bytes": self.low_bytes,
            "unfinished": self.unfinished,
            "namespaces": [each.to_json() for each in self.namespaces.values()],
        }

    def to_line(self) -> str:
        """As logged: one event, key=value."""
        pairs: list[tuple[str, object]] = [
            ("scanned", self.scanned.chunks),
            ("scanned_bytes", self.scanned.bytes),
            *((f"chosen_{reason}", amount.chunks) for reason, amount in self.chosen.items()),
            ("condemned", self.condemned.chunks),
            ("reaped", self.reaped.chunks),
            ("reaped_bytes", self.reaped.bytes),
            *((f"spared_{why.replace(' ', '_')}", count) for why, count in self.spared.items() if count),
            *((f"sweeps_{outcome}", count) for outcome, count in self.sweeps.items() if count),
            *((f"orphans_{kind}", count) for kind, count in self.orphans.items() if count),
            ("used_bytes", self.used_after_bytes),
            ("capacity_bytes", self.capacity_bytes),
            ("seconds", f"{sum(self.seconds.values()):.2f}"),
        ]
        said = " ".join(f"{key}={value}" for key, value in pairs)
        return f"gc.round {said}" + (f" unfinished={'; '.join(self.unfinished)!r}" if self.unfinished else "")
