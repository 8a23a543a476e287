"""The roster of workers: which of them are missing, and how often each began again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.counts import STARTED
from kvstore.dashboard.history import Counts

SILENT_S = 4.0
"""etcd forgets a worker that ends itself at once, and no client asks it for longer than this. The registration of one
that was killed stays until its lease ends, which takes longer."""
MISSING_S = 3_600.0
"""A missing worker is shown for so long."""
MISSING_MAX = 100


class Roster:
    """Workers by address. A worker is missing if etcd still had it while it was silent, and then forgot it.

    Not thread-safe. Times are in seconds since the epoch.
    """

    def __init__(self) -> None:
        self._last: dict[str, Counts] = {}
        self._asked_at_s: dict[str, float] = {}
        self._restarts: Counter[str] = Counter()
        self._former_until_s: dict[str, float] = {}
        self._silent_since_s: dict[str, float] = {}
        self._missing_since_s: dict[str, float] = {}

    def call(
        self, answers: Mapping[str, Counts | None], now_s: float, asked_at_s: float | None = None
    ) -> Mapping[str, float]:
        """Notes the answer of each registered worker, None if it is silent; they were asked at ``asked_at_s``.

        Returns the missing workers, and since when each has been silent.
        """
        for address, counts in answers.items():
            self._missing_since_s.pop(address, None)
            if counts is None:
                self._silent_since_s.setdefault(address, now_s)
            else:
                self._silent_since_s.pop(address, None)
                if _is_another_run(self._last.get(address, counts), counts):
                    self._restarts[address] += 1
                    self._former_until_s[address] = self._asked_at_s[address]
                self._last[address] = counts
                self._asked_at_s[address] = now_s if asked_at_s is None else asked_at_s
        for address in self._silent_since_s.keys() - answers.keys():
            since_s = self._silent_since_s.pop(address)
            if now_s - since_s > SILENT_S:
                self._missing_since_s[address] = since_s
        self._forget(answers, now_s)
        return self._missing_since_s

    def restarts(self, address: str) -> int:
        """Returns how often a worker was seen to run anew since the roster began."""
        return self._restarts[address]

    def former_until_s(self, address: str) -> float | None:
        """Returns when the run before this one was last asked and answered; None if no restart was seen."""
        return self._former_until_s.get(address)

    def _forget(self, answers: Mapping[str, Counts | None], now_s: float) -> None:
        missing = self._missing_since_s
        for address in sorted(missing, key=missing.__getitem__):
            if now_s - missing[address] > MISSING_S or len(missing) > MISSING_MAX:
                del missing[address]
        for address in self._last.keys() - answers.keys() - missing.keys():
            del self._last[address], self._asked_at_s[address], self._restarts[address]
            self._former_until_s.pop(address, None)


def _is_another_run(before: Counts, now: Counts) -> bool:
    # Counters do not tell: those of an idle worker are 0 in both runs, and a busy one soon counts more than before.
    return before.get(STARTED) != now.get(STARTED)
