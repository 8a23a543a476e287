"""Cycles one after another, a root that hangs, and what a collector imports."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace

import pytest

from kvstore.errors import RootMismatch, Unavailable
from kvstore.meta.memory import MemoryMetadata
from kvstore_gc.capacity import Pressure
from kvstore_gc.collector import RETRY_S_MIN, Collector, CycleScheduler
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.rank import CountAndBytes
from kvstore_gc.summary import Summary
from kvstore_gc.threads import Stop, Stopped, Threads, within
from tests.kit.clusters import TIMINGS, site_of
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S, returns
from tests.kit.place import Place
from tests.kit.programs import ended


@dataclass
class Driven(Cycle):
    """A cycle whose time passes only while the service waits."""

    clock: FakeClock = field(default_factory=FakeClock)
    began: list[float] = field(default_factory=list)
    evictions: int = 0
    spends: int = 0
    """Evictions that spend the ranking, of each cycle."""
    reaped: int = 1
    errors: list[Exception] = field(default_factory=list)
    until_s: float = 100.0

    @property
    def now_s(self) -> float:
        return self.clock.monotonic_s() - self.start_s

    @property
    def is_spent(self) -> bool:
        return self.left == 0

    @property
    def listing_s(self) -> float:
        return 5.0

    def run(self) -> Summary:
        self.began.append(round(self.now_s, 2))
        self.left = self.spends or -1
        if self.errors:
            raise self.errors.pop(0)
        if not self.reaped:
            self.left = 0
        return self._summary_of(self.reaped)

    def evict(self) -> Summary | None:
        self.evictions += 1
        self.left -= 1
        return self._summary_of(1)

    def serve(self, interval_s: float = 30.0) -> None:
        self.start_s, self.left = self.clock.monotonic_s(), -1

        def pause(pause_s: float) -> None:
            self.clock.advance(pause_s)
            if self.now_s >= self.until_s:
                raise Stopped

        site = replace(site_of(MemoryMetadata(), clock=self.clock), pause=pause)
        CycleScheduler(self, site, interval_s, done=lambda summary: None).run()

    @staticmethod
    def _summary_of(count: int) -> Summary:
        return Summary(dry_run=False, started_s=0.0, shards_count=1, reaped=CountAndBytes(count, count))


def test_a_cycle_that_fails_is_repeated_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven(errors=[Unavailable("etcd did not answer") for _ in range(5)], until_s=31.5)
    with caplog.at_level(logging.INFO, "kvstore_gc"):
        driven.serve()
    assert driven.began[:6] == pytest.approx([0, 1, 3, 7, 15, 31], abs=0.5) and RETRY_S_MIN == 1.0
    said = [record.message.split()[0] for record in caplog.records]
    assert [each for each in said if each != "gc.round"] == ["gc.round_failed", "gc.round_recovered"]


def test_a_cycle_begins_at_the_interval_and_once_a_ranking_is_spent() -> None:
    regular = Driven(until_s=70.0)
    regular.serve()
    assert regular.began == pytest.approx([0, 30, 60], abs=0.2) and regular.evictions > 1000
    spent = Driven(until_s=10.0, spends=20)
    spent.serve()
    assert spent.began[:5] == pytest.approx([0, 1, 2, 3, 4], abs=0.2)


def test_a_cycle_that_finds_all_held_is_repeated_after_a_pause() -> None:
    held = Driven(until_s=21.0, reaped=0)
    held.serve()
    assert held.began == pytest.approx([0, 5, 10, 15, 20])


def test_a_single_round_gives_up_on_a_root_that_hangs(place: Place) -> None:
    hang = Hang()
    rules = [Rule(operation, hang) for operation in ("space", "list")]
    site = place.cluster.site(FaultyRoot(place.cluster.root, rules), timings=replace(TIMINGS, hung_s=0.3))
    never = threading.Event()
    with pytest.raises(Unavailable, match="the root has not answered"):
        Collector(site, Config(), never.wait).once(lambda shard: None)
    hang.release.set()


def test_a_collector_whose_capacity_thread_has_died_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would go on without a level, and nodes without a credit."""

    def tick(pressure: Pressure) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Pressure, "tick", tick)
    ended = threading.Event()
    try:
        with pytest.raises(RuntimeError, match="new thread"):
            returns(lambda: Collector(place.cluster.site(), Config(), ended.wait).serve(60.0))
    finally:
        ended.set()


HANGING = """
import sys, threading
from kvstore.meta.memory import MemoryMetadata
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from kvstore.root.identity import create_or_open
from kvstore.root.memory import MemoryRoot
from kvstore.core.clock import RandomIds
from kvstore_gc.config import Config
from kvstore_gc.collector import Collector
from kvstore_gc.site import Site

root = MemoryRoot()
identity = create_or_open(root, RandomIds())
hang = Hang()
faulty = FaultyRoot(root, [Rule("list", hang)])
collector = Collector(Site(faulty, identity, MemoryMetadata()), Config(), lambda pause_s: hang.reached.wait(pause_s))
collector.serve(1.0, None, print, print)
sys.exit("it did not end")
"""


@pytest.mark.slow
def test_a_signal_ends_a_collector_whose_root_hangs() -> None:
    done = ended(sys.executable, "-c", HANGING)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "gc.left_hanging" in done.stderr


# Threads for calls to the root, which may never return


def test_nobody_waits_for_a_hanging_call_once_the_end_is_asked_for() -> None:
    stop, release, reached = Stop(), threading.Event(), threading.Event()

    def hang(number: int) -> None:
        reached.set()
        release.wait()

    def ask() -> None:
        reached.wait(PATIENCE_S)
        stop.ask()

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(Stopped):
        Threads(2, stop).each(2, hang)
    release.set()
    asking.join(PATIENCE_S)


def test_a_call_that_does_not_return_in_time_is_unavailable() -> None:
    release = threading.Event()
    with pytest.raises(Unavailable, match="the root did not answer"):
        within(0.05, "the root", release.wait)
    release.set()
    assert within(10, "the root", lambda: 7) == 7
    with pytest.raises(RootMismatch):
        within(10, "the root", _mismatch)


def _mismatch() -> None:
    raise RootMismatch("another")


UNUSED = ("click", "rich", "prometheus_client", "grpc", "fsspec", "sqlite3", "cryptography", "opentelemetry")


def test_a_collector_imports_only_where_it_is_used() -> None:
    program = (
        f"import sys, kvstore_gc.collector; sys.exit(str([name for name in {UNUSED} if name in sys.modules] or ''))"
    )
    found = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False, capture_output=True)
    assert found.stderr.strip() == b"", found.stderr
