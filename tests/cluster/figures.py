"""Figures from the engines' journals for a stretch of time: requests, hits, errors, and when all was well again."""

from __future__ import annotations

from collections import Counter
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

    requests: int
    hit_ratio: float
    errors: Counter[str]
    """The messages, each after the call that failed (match, get, put)."""
    shed: int
    wrong_bytes: int


class Diary:
    """All that the engines have written, by host. Times are monotonic, which all processes of a kernel share."""

    def __init__(self, folder: Path) -> None:
        self._journals = Journals(folder)
        self._facts: dict[str, list[Fact]] = {}

    def between(self, since_s: float, until_s: float) -> Figures:
        """Returns the figures of the requests that ended between two times."""
        served = [
            each
            for host in self._read().values()
            for each in host
            if each["fact"] == SERVED and since_s <= each["at_s"] < until_s
        ]
        wanted = sum(each.get("blocks", 0) for each in served) * BLOCK_TOKENS
        return Figures(
            len(served),
            sum(each.get("got", 0) for each in served) / wanted if wanted else 0.0,
            Counter(each["error"] for each in served if each["error"]),
            sum(bool(each.get("shed")) for each in served),
            sum(each.get("wrong", 0) for each in served),
        )

    def well_since_s(self, host: str, after_s: float) -> float | None:
        """Returns when a host's engine was served as before, in requests that began after a time; None if not yet."""
        served = [
            each
            for each in self._read().get(host, [])
            if each["fact"] == SERVED and each["at_s"] - each["took_s"] >= after_s
        ]
        last_bad = max((at for at, each in enumerate(served) if each["error"] or each.get("shed")), default=-1)
        streak = served[last_bad + 1 :]
        return streak[0]["at_s"] if len(streak) >= STREAK else None

    def pinned_by(self, host: str, since_s: float, until_s: float) -> int:
        """Counts the accepted pins of a host's engine."""
        facts = self._read().get(host, [])
        return sum(each["fact"] == PINNED and since_s <= each["at_s"] < until_s for each in facts)

    def _read(self) -> dict[str, list[Fact]]:
        for journal, fact in self._journals.new():
            self._facts.setdefault(journal, []).append(fact)
        return self._facts
