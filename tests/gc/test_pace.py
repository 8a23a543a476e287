"""A collector leaves its host to the engines, and stops sparing it when the root fills up."""

from __future__ import annotations

from dataclasses import replace

from kvstore.meta.memory import MemoryMetadata
from kvstore_gc.capacity import Pressure
from kvstore_gc.collector import BURST_S, SHARE, Pace
from tests.kit.clusters import site_of
from tests.kit.fake_meta import FakeClock


class _Host:
    """Work costs processor time and as much elapsed time; a pause costs elapsed time alone."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.used_s = 0.0
        site = replace(site_of(MemoryMetadata(), clock=self.clock), pause=self.clock.advance)
        self.pressure = Pressure(site, 100)
        self.pace = Pace(site, self.pressure, used_s=lambda: self.used_s)

    def work(self, work_s: float) -> None:
        self.clock.advance(work_s)
        self.used_s += work_s

    def elapsed_s(self, pieces: int, piece_s: float) -> float:
        began_s = self.clock.monotonic_s()
        self.pace.each(pieces, lambda number: self.work(piece_s))
        return self.clock.monotonic_s() - began_s


def test_a_collector_keeps_to_its_share_of_a_core() -> None:
    host = _Host()
    elapsed_s = host.elapsed_s(1000, 0.02)
    assert 0.9 * (20 - BURST_S) / SHARE <= elapsed_s <= 1.1 * 20 / SHARE


def test_rest_is_not_saved_up_beyond_a_burst() -> None:
    host = _Host()
    host.clock.advance(3600)
    assert host.elapsed_s(1000, 0.02) >= 0.9 * (20 - BURST_S) / SHARE


def test_a_root_that_fills_up_is_collected_at_full_speed() -> None:
    host = _Host()
    host.pressure.after_listing(100)
    assert host.elapsed_s(1000, 0.02) < 21
