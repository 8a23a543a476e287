"""The outcome of one round, in numbers: for the log, for ``--json``, for metrics and for the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.namespace import Namespace
from kvstore_gc.execute import SweepReport
from kvstore_gc.rank import CountAndBytes, Ranking, Rows, VerdictReason, tallies

NAMESPACES_MAX = 512
"""A summary has the largest namespaces."""


@dataclass(slots=True)
class NamespaceSummary:
    """The chunks of a namespace, and those of them that were chosen, by reason."""

    id: str
    tenant: str | None = None
    name: str | None = None
    scanned: CountAndBytes = field(default_factory=CountAndBytes)
    chosen: dict[str, CountAndBytes] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The namespace as ``--json`` prints it."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "name": self.name,
            "scanned": _json(self.scanned),
            "chosen": {reason: _json(tally) for reason, tally in self.chosen.items()},
        }


@dataclass(slots=True, kw_only=True)
class Summary(SweepReport):
    """One round. The plan chose ``chosen``. Those still unused when looked at again were ``condemned``, and those
    deleted are ``reaped``. ``spared`` counts the others by why.
    """

    dry_run: bool
    started_s: float
    shards_count: int
    is_listed: bool = False
    """True if the root was listed: else it went on from the last listing, or another collector works."""
    namespaces: dict[str, NamespaceSummary] = field(default_factory=dict)
    scanned: CountAndBytes = field(default_factory=CountAndBytes)
    kept: dict[str, CountAndBytes] = field(default_factory=dict)
    chosen: dict[str, CountAndBytes] = field(default_factory=dict)
    orphans: Counter[str] = field(default_factory=Counter)
    used_before_bytes: int = 0
    used_after_bytes: int = 0
    other_files: CountAndBytes = field(default_factory=CountAndBytes)
    """Files other than chunks that take room of the capacity as well: staged, in trash, set aside."""
    capacity_bytes: int | None = None
    limit_bytes: int | None = None
    """``--max-bytes``; None without it."""
    target_bytes: int | None = None
    """Eviction keeps used bytes below this; None if the capacity is unknown."""
    unfinished: list[str] = field(default_factory=list)
    """The things that the round had to do and could not, in words."""

    def listed(self, ranking: Ranking, namespaces: Sequence[Namespace]) -> None:
        """Adds a listing; ``namespaces`` are those whose names are known."""
        self.scanned, self.is_listed = ranking.total, True
        self.used_before_bytes = self.used_after_bytes = ranking.total.bytes
        within = ranking.total - ranking.due - ranking.pinned
        kept = {
            VerdictReason.WITHIN: within,
            VerdictReason.PINNED: ranking.pinned,
            VerdictReason.FOREIGN: ranking.foreign,
        }
        self.kept = {reason.value: tally for reason, tally in kept.items() if tally.count}
        known = {each.id: each for each in namespaces}
        largest = sorted(ranking.namespaces.items(), key=lambda each: -each[1].bytes)[:NAMESPACES_MAX]
        for namespace, tally in largest:
            record = known.get(namespace)
            tenant, name = (record.tenant, record.name) if record else (None, None)
            self.namespaces[namespace.hex()] = NamespaceSummary(namespace.hex(), tenant, name, tally)

    def chose(self, rows: Rows) -> None:
        """Adds chunks that were chosen."""
        for namespace, reason, tally in tallies(rows):
            found = self.namespaces.setdefault(namespace.hex(), NamespaceSummary(namespace.hex()))
            for counts in (self.chosen, found.chosen):
                counts[reason.value] = counts.get(reason.value, CountAndBytes()) + tally

    def to_json(self) -> dict[str, Any]:
        """The round as ``--json`` prints it."""
        return {
            "dry_run": self.dry_run,
            "started_s": round(self.started_s, 3),
            "shards": self.shards_count,
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
            "beside": {"files": self.other_files.count, "bytes": self.other_files.bytes},
            "capacity_bytes": self.capacity_bytes,
            "limit_bytes": self.limit_bytes,
            "target_bytes": self.target_bytes,
            "unfinished": self.unfinished,
            "namespaces": [each.to_json() for each in self.namespaces.values()],
        }

    def to_line(self) -> str:
        """The round as one event of the log, key=value."""
        pairs: list[tuple[str, object]] = [
            ("scanned", self.scanned.count),
            *((f"chosen_{_key(reason)}", tally.count) for reason, tally in self.chosen.items()),
            ("condemned", self.condemned.count),
            ("reaped", self.reaped.count),
            ("reaped_bytes", self.reaped.bytes),
            *((f"spared_{_key(why)}", count) for why, count in self.spared.items() if count),
            *((f"sweeps_{outcome}", count) for outcome, count in self.sweeps.items() if count),
            *((f"orphans_{kind}", count) for kind, count in self.orphans.items() if count),
            ("used_bytes", self.used_after_bytes),
            ("capacity_bytes", self.capacity_bytes),
            ("seconds", f"{sum(self.seconds.values()):.2f}"),
        ]
        line = " ".join(f"{key}={value}" for key, value in pairs)
        return f"gc.round {line}" + (f" unfinished={'; '.join(self.unfinished)!r}" if self.unfinished else "")


def _json(tally: CountAndBytes) -> dict[str, int]:
    return {"chunks": tally.count, "bytes": tally.bytes}


def _key(words: str) -> str:
    return words.replace(" ", "_")
