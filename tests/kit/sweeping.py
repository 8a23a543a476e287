"""A sweeper that brings its sweeps to their end by itself; a cycle begins other ones while it waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.format import places
from kvstore.format.places import Name
from kvstore.host.eviction import EvictionVictim
from kvstore.meta.keys import part_of
from kvstore.root.interface import Root
from kvstore_gc.deletion import SweepPlan
from kvstore_gc.execute import Sweeper, SweepReport
from kvstore_gc.site import Site


class WholeSweeper(Sweeper):
    """A sweeper of one site."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._place = site

    def sweep(self, plans: Sequence[SweepPlan]) -> SweepReport:
        """Deletes the victims of the plans, except those that are held, pinned, or used since they were listed."""
        report = SweepReport()
        with self.abandoning(report):
            self.begin(plans, report)
            self._finish(report)
        return report

    def adopt(self) -> SweepReport:
        """Finishes the sweeps in flight, which others have begun and perhaps left (rule G7)."""
        report = SweepReport()
        with self.abandoning(report):
            self.recover(report)
            self._finish(report)
        return report

    def _finish(self, report: SweepReport) -> None:
        timings = self._place.timings
        wait_s = timings.poll_s_min
        while self.busy_parts:
            if self.advance(report):
                wait_s = timings.poll_s_min
            elif self.busy_parts:
                self._place.pause(wait_s)
                wait_s = min(2 * wait_s, timings.poll_s_max)


def plans_of(root: Root, names: Iterable[Name]) -> list[SweepPlan]:
    """Plans to take these chunk files."""
    parts: dict[int, list[EvictionVictim]] = {}
    for name in names:
        chunk, stat = places.parse_chunk(name.rpartition("/")[2]), root.stat(name)
        if chunk is not None and stat is not None:
            victim = EvictionVictim(*chunk, stat.size_bytes, stat.mtime_ns)
            parts.setdefault(part_of(victim.address), []).append(victim)
    return [SweepPlan(part, tuple(victims)) for part, victims in sorted(parts.items())]
