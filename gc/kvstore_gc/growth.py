"""How much came to the root and went from it since it was surveyed, by what nodes and collectors report.

Pure arithmetic, apart from who reads the reports.  Where a survey and a report overlap, writes count twice and
deletions not at all, until the next survey: too early a round is better than a full disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.meta.keys import SessionId
from kvstore.meta.usage import Usage


@dataclass(frozen=True, slots=True)
class Mark:
    """What was reported when a listing began."""

    reported: Mapping[SessionId, Usage]


class Growth:
    """The sum over all reporters. One thread at a time. A reporter that is gone keeps its last report."""

    def __init__(self) -> None:
        self._reported: dict[SessionId, Usage] = {}
        self._base: dict[SessionId, Usage] = {}
        self._unheard: set[SessionId] = set()
        self._answered: dict[SessionId, Usage] = {}
        """First answers since the mark of those that were unheard then."""
        self._gone: set[SessionId] = set()
        self._reaped_bytes = self._reaped_base = 0
        self._settles_s = 0.0
        self.ignored_bytes = 0
        """Deleted by others since the survey, and not subtracted: they may have been deleted before it ended."""

    @property
    def bytes(self) -> int:
        """Written less deleted since the survey; negative where more was deleted."""
        none = Usage()
        removed_bytes = sum(
            now.removed_bytes - self._base.get(reporter, none).removed_bytes for reporter, now in self._reported.items()
        )
        return self.written_bytes - removed_bytes - (self._reaped_bytes - self._reaped_base)

    @property
    def written_bytes(self) -> int:
        """Written since the listing of the survey began."""
        none = Usage()
        return sum(
            now.written_bytes - self._base.get(reporter, none).written_bytes for reporter, now in self._reported.items()
        )

    @property
    def reaped_bytes(self) -> int:
        """All that this collector ever deleted."""
        return self._reaped_bytes

    def reported(self, reporter: SessionId, usage: Usage, now_s: float, *, is_answer: bool) -> None:
        """A report was read. ``is_answer``: it was made after a collector had asked for it."""
        before = self._reported.get(reporter, Usage())
        now = self._reported[reporter] = before.latest(usage)
        self._gone.discard(reporter)
        if is_answer and reporter in self._unheard:
            # Its report before was older than the survey: how much of the difference was listed nobody knows. Counting
            # all of it might fill the root with the work of hours; what it wrote meanwhile is for the next survey.
            self._unheard.discard(reporter)
            self._base[reporter] = self._answered[reporter] = now
        removed_bytes = now.removed_bytes - before.removed_bytes
        if removed_bytes and now_s < self._settles_s:
            # Deleted before the listing ended perhaps, and so not in it.
            base = self._base.get(reporter, Usage())
            self._base[reporter] = Usage(base.written_bytes, base.removed_bytes + removed_bytes)
            self.ignored_bytes += removed_bytes

    def gone(self, reporter: SessionId) -> None:
        """Its key is gone; what it wrote is there still."""
        self._gone.add(reporter)

    def reaped(self, size_bytes: int) -> None:
        """This collector deleted something."""
        self._reaped_bytes += size_bytes

    def mark(self, unheard: frozenset[SessionId] = frozenset()) -> Mark:
        """Before a listing begins. ``unheard`` are nodes whose reports, if any, are older than this moment."""
        self._unheard, self._answered = set(unheard), {}
        return Mark(dict(self._reported))

    def surveyed(self, mark: Mark, settles_s: float) -> None:
        """The listing that began at ``mark`` has ended. Reports of deletions are late until ``settles_s``."""
        kept = {
            reporter: usage
            for reporter, usage in self._reported.items()
            if reporter not in self._gone or usage != mark.reported.get(reporter)
        }
        self._base = {
            reporter: Usage(
                self._answered.get(reporter, mark.reported.get(reporter, Usage())).written_bytes, usage.removed_bytes
            )
            for reporter, usage in kept.items()
        }
        self._reported = kept
        self._gone &= kept.keys()
        self._reaped_base = self._reaped_bytes
        self._settles_s = settles_s
        self.ignored_bytes = 0
