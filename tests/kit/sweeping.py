"""A sweeper that brings its sweeps to their end by itself; a cycle begins other ones while it waits."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_gc.capacity import Pressure
from kvstore_gc.deletion import SweepPlan
from kvstore_gc.execute import Sweeper, SweepReport
from kvstore_gc.site import Site


class WholeSweeper(Sweeper):
    """A sweeper of one site."""

    def __init__(self, site: Site, pressure: Pressure | None = None) -> None:
        super().__init__(site, pressure)
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
