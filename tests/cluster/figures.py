"""Figures from the engines' journals for a stretch of time: requests, hits, errors, and when all was well again."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.replay.trace import BLOCK_TOKENS
from tests.chaos.journal import Fact, Journals
from tests.cluster.engine import PINNED, SERVED

STREAK = 6
"""So many requests of an engine in a row without any trouble: it is well again since the first of them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A stretch of time, all engines together."""

    seconds: float
    requests: int
    hit_ratio: float
    errors: Counter[str]
    """By what was asked for (match, get, put), of requests that could not be served or stored."""
    shed: int
    short: int
    wrong_bytes: int
    slowest_s: float
    median_s: float
    pinned: int

    @property
    def trouble(self) -> int:
        """Counts the requests with something that could not be stored or answered."""
        return self.errors.total() + self.shed + self.short


class Diary:
    """All that the engines have written, by host. Times are monotonic, which all processes of a kernel share."""

    def __init__(self, folder: Path) -> None:
        self._journals = Journals(folder)
        self._facts: dict[str, list[Fact]] = {}

    def read(self) -> None:
        """Reads the new entries."""
        for journal, fact in self._journals.new():
            self._facts.setdefault(journal, []).append(fact)

    def between(self, since_s: float, until_s: float) -> Figures:
        """Returns the figures of the requests that ended between two times."""
        self.read()
        facts = [each for host in self._facts.values() for each in host if since_s <= each["at_s"] < until_s]
        served = [each for each in facts if each["fact"] == SERVED]
        wanted = sum(each.get("blocks", 0) for each in served) * BLOCK_TOKENS
        took_s = [each["took_s"] for each in served] or [0.0]
        return Figures(
            until_s - since_s,
            len(served),
            sum(each.get("got", 0) for each in served) / wanted if wanted else 0.0,
            Counter(each["error"].split(":")[0] for each in served if each["error"]),
            sum(each.get("shed", 0) for each in served),
            sum(bool(each.get("short")) for each in served),
            sum(each.get("wrong", 0) for each in served),
            max(took_s),
            statistics.median(took_s),
            sum(each["fact"] == PINNED for each in facts),
        )

    def well_since_s(self, host: str, after_s: float) -> float | None:
        """Returns when a host's engine was served as before, in requests that began after a time; None if not yet."""
        self.read()
        served = [
            each
            for each in self._facts.get(host, [])
            if each["fact"] == SERVED and each["at_s"] - each["took_s"] >= after_s
        ]
        last_bad = max((place for place, each in enumerate(served) if is_trouble(each)), default=-1)
        streak = served[last_bad + 1 :]
        return streak[0]["at_s"] if len(streak) >= STREAK else None

    def pinned_by(self, host: str, since_s: float, until_s: float) -> int:
        """Counts the accepted pins of a host's engine."""
        self.read()
        return sum(each["fact"] == PINNED and since_s <= each["at_s"] < until_s for each in self._facts.get(host, []))

    def errors(self, since_s: float, until_s: float) -> Counter[str]:
        """Returns the messages of a stretch of time, for closer study."""
        self.read()
        facts = [each for host in self._facts.values() for each in host if since_s <= each["at_s"] < until_s]
        return Counter(each["error"] for each in facts if each.get("error"))


def is_trouble(fact: Fact) -> bool:
    """True if a request was not served as it would be on a good day."""
    return bool(fact["error"] or fact.get("shed") or fact.get("short"))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be."""
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
