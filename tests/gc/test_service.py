"""Rounds one after another, and the duties beside them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.format.places import GENERATIONS, HOST_GENERATIONS, Name
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.memory_store import MemoryStore
from kvstore.meta.usage import Room
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryRoot
from kvstore_gc.capacity import Watermarks
from kvstore_gc.membership import TTL_S, Collectors
from kvstore_gc.config import Config
from kvstore_gc.service import BACKOFF_S_MIN, Service
from kvstore_gc.serving import Collector
from kvstore_gc.threads import Stopped
from kvstore_gc.watch import TICK_S, Duties, Watch
from tests.kit.cases import for_each
from tests.kit.clusters import site_of
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S
from tests.kit.place import Place

# Rounds one after another


@dataclass
class Driven:
    """A service whose time passes only while it waits."""

    clock: FakeClock = field(default_factory=FakeClock)
    began: list[float] = field(default_factory=list)
    done: list[object] = field(default_factory=list)
    urgent_at: set[float] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)
    until_s: float = 100.0

    def run(self, interval_s: float = 30.0) -> None:
        start_s = self.clock.monotonic_s()

        def now() -> float:
            return self.clock.monotonic_s() - start_s

        def round_() -> str:
            self.began.append(round(now(), 3))
            if self.errors:
                raise self.errors.pop(0)
            return "summary"

        def urgent() -> bool:
            due = {at for at in self.urgent_at if at <= now()}
            self.urgent_at -= due
            return bool(due)

        def pause(pause_s: float) -> None:
            self.clock.advance(pause_s)
            if now() >= self.until_s:
                raise Stopped

        Service(
            round_,
            interval_s=interval_s,
            is_urgent=urgent,
            done=self.done.append,
            pause=pause,
            clock=self.clock,
        ).run()


def test_a_round_that_fails_is_repeated_with_growing_pauses_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven(errors=[Unavailable("etcd did not answer") for _ in range(5)], urgent_at={2.0, 5.0})
    with caplog.at_level(logging.INFO, "kvstore_gc"):
        driven.until_s = 31.5
        driven.run()
    assert driven.began[:6] == pytest.approx([0, 1, 3, 7, 15, 31], abs=0.5) and BACKOFF_S_MIN == 1.0
    assert [record.message.split()[0] for record in caplog.records] == ["gc.round_failed", "gc.round_recovered"]


# Beside rounds


def watched(root: Root, meta: Meta, clock: FakeClock, watermarks: Watermarks) -> tuple[Watch, Collectors]:
    site = replace(site_of(meta, clock=clock), root=root)
    duties = Duties.of(site, watermarks)
    return Watch(site, watermarks, duties), duties.collectors


@for_each("generations", [HOST_GENERATIONS, GENERATIONS])
def test_s8_a_collector_of_one_host_whose_lease_ended_counts_again(generations: Name) -> None:
    """Nodes wrote on meanwhile, and reported nothing of it."""
    clock, marks = FakeClock(), Watermarks(1000, 0.9)
    meta, keys = MemoryMeta(MemoryStore(clock)), Keys(bytes(16))
    site = replace(site_of(meta, clock=clock), generations=generations)
    duties = Duties.of(site, marks)
    watch = Watch(site, marks, duties)
    watch.tick()
    marks.surveyed(300, marks.mark())
    (mine,) = meta.list(keys.collectors).items
    meta.revoke(mine.lease)
    clock.advance(TTL_S)
    watch.tick()
    assert duties.collectors.me is not None
    assert (marks.level is None) == (generations == HOST_GENERATIONS), "what etcd's nodes write, it hears of"
    found = meta.get(keys.gc_room)
    assert found is not None
    assert (Room.from_json(found.value).allowance_bytes is None) == (generations == HOST_GENERATIONS)


def test_a_root_that_hangs_is_noticed_and_the_collector_s_place_ends() -> None:
    clock, hang = FakeClock(), Hang()
    root = FaultyRoot(MemoryRoot(), [Rule("space", hang, nth=2)])
    meta = MemoryMeta(MemoryStore(clock))
    watch, collectors = watched(root, meta, clock, Watermarks(None, 0.9))
    watch.tick()
    clock.advance(TICK_S)
    thread = threading.Thread(target=watch.tick)
    thread.start()
    assert hang.reached.wait(PATIENCE_S)
    clock.advance(TTL_S + 1)
    assert watch.silent_s > TTL_S and collectors.me is None
    assert not meta.list(Keys(bytes(16)).collectors).items, "others take its shards"
    hang.release.set()
    thread.join(PATIENCE_S)
    assert watch.silent_s == 0 and collectors.me is not None


def test_a_single_round_gives_up_on_a_root_that_hangs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_gc.serving.HUNG_S", 0.3)
    monkeypatch.setattr("kvstore_gc.serving.LISTEN_S", 0.01)
    hang = Hang()
    rules = [Rule(operation, hang) for operation in ("space", "list")]
    site = place.cluster.site(FaultyRoot(place.cluster.root, rules))
    never = threading.Event()
    with pytest.raises(Unavailable, match="the root has not answered"):
        Collector(site, Config(), never.wait).once(lambda shard: None)
    hang.release.set()


HANGING = """
import sys, threading
from kvstore.meta.memory import MemoryMeta
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from kvstore.root.identity import create_or_open
from kvstore.root.memory import MemoryRoot
from kvstore.sources import RandomIds
from kvstore_gc.config import Config
from kvstore_gc.serving import Collector
from kvstore_gc.site import Site

root = MemoryRoot()
identity = create_or_open(root, RandomIds())
hang = Hang()
faulty = FaultyRoot(root, [Rule("list", hang)])
collector = Collector(Site(faulty, identity, MemoryMeta()), Config(), lambda pause_s: hang.reached.wait(pause_s))
collector.serve(1.0, None, print, print)
sys.exit("it did not end")
"""


@pytest.mark.slow
def test_a_signal_ends_a_collector_whose_root_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "gc.left_hanging" in done.stderr
