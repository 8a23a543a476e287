"""Rounds on real nodes, rounds one after another, sharing among collectors, and what happens beside them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvstore.address import Chain
from kvstore.errors import RootMismatch, Unavailable
from kvstore.format import places
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.memory_store import MemoryStore
from kvstore.meta.usage import Usage
from kvstore.recency import NS_PER_S
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.sources import SystemClock
from kvstore_gc.capacity import Level, Watermarks
from kvstore_gc.collectors import TTL_S, Collectors, owner
from kvstore_gc.config import Config, Share
from kvstore_gc.rounds import Rounds
from kvstore_gc.safety import Timings
from kvstore_gc.service import BACKOFF_S_MIN, Service
from kvstore_gc.serving import Collector
from kvstore_gc.summary import Summary
from kvstore_gc.threads import Stop, Stopped, Threads, within
from kvstore_gc.watch import TICK_S, Duties, Watch
from tests.gc.cluster import SPACE, TIMINGS, Cluster, cluster, eventually, prompt, put, site_of
from tests.meta.fakes import CountingIds, FakeClock
from tests.meta.faulty import Fault, FaultyMeta
from tests.meta.faulty import Rule as MetaRule
from tests.patience import PATIENCE_S
from tests.root.faulty import EIO, FaultyRoot, Hang, Rule

LONG_S = 3600.0


@dataclass
class Place:
    """A cluster with one node, and collectors that run whole rounds on it."""

    cluster: Cluster
    stop: Stop = field(default_factory=Stop)

    def rounds(
        self,
        config: Config | None = None,
        *,
        root: Root | None = None,
        meta: Meta | None = None,
        shards: Callable[[int], range] = range,
        timings: Timings = TIMINGS,
        watermarks: Watermarks | None = None,
    ) -> Rounds:
        config = config or Config()
        site = self.cluster.site(root, meta, timings=timings, pause=self.stop.pause)
        return Rounds(site, config, watermarks or Watermarks(config.max_bytes, config.high), shards=shards)

    def age(self, chain: Chain, age_s: float = LONG_S) -> None:
        """As if nobody had used it for so long."""
        for depth, address in enumerate(chain.addresses):
            stamp_s = int(SystemClock().now_s() - age_s) // 60 * 60 + 1
            assert self.cluster.root.touch(self.cluster.name(address), stamp_s * NS_PER_S - 3000 * depth)

    def bytes_of(self, chain: Chain) -> int:
        stats = [self.cluster.root.stat(self.cluster.name(address)) for address in chain.addresses]
        return sum(stat.size_bytes for stat in stats if stat)

    def tree(self) -> dict[str, object]:
        """All files of the root, with sizes and times."""

        def walk(folder: places.Name) -> Iterator[tuple[str, object]]:
            for entry in self.cluster.root.list(folder):
                name = places.Name(f"{folder}/{entry.name}" if folder else entry.name)
                if entry.stat is None:
                    yield name, None
                    yield from walk(name)
                else:
                    yield name, entry.stat

        return dict(walk(places.Name("")))


@pytest.fixture
def place() -> Iterator[Place]:
    with cluster() as made:
        yield Place(made)


# One round


def test_a_round_deletes_what_is_past_its_time_and_says_so(place: Place) -> None:
    node, old, new = place.cluster.node(), prompt(1, 6), prompt(2, 4)
    put(node, old)
    put(node, new)
    place.age(old)
    size = place.bytes_of(old)
    summary = place.rounds(Config(ttl_s=600)).run()
    assert (place.cluster.present(old), place.cluster.present(new)) == (0, 4)
    assert (summary.reaped.count, summary.reaped.bytes, summary.unfinished) == (6, size, [])
    assert summary.used_after_bytes == summary.used_before_bytes - size == place.bytes_of(new)
    assert place.cluster.leftovers() == []
    told = summary.to_json()
    assert told["chosen"] == {"past its time to live": {"chunks": 6, "bytes": size}}
    assert told["kept"] == {"within capacity": {"chunks": 4, "bytes": place.bytes_of(new)}}
    assert [(each["name"], each["scanned"]["chunks"]) for each in told["namespaces"]] == [(SPACE.name, 10)]
    assert {"check", "survey", "plan", "condemn", "grace", "reap", "close"} <= set(told["seconds"])
    assert "chosen_past_its_time_to_live=6" in summary.to_line() and "unfinished" not in summary.to_line()


def test_a_round_brings_a_full_root_below_its_low_watermark_leaves_first(place: Place) -> None:
    node, chains = place.cluster.node(), [prompt(number, 5) for number in range(4)]
    for number, chain in enumerate(chains):
        put(node, chain)
        place.age(chain, LONG_S * (4 - number))
    used = sum(map(place.bytes_of, chains))
    summary = place.rounds(Config(max_bytes=used)).run()
    assert summary.unfinished == [] and summary.low_bytes is not None
    assert summary.used_after_bytes <= summary.low_bytes
    assert [place.cluster.present(chain) for chain in chains] == [1, 5, 5, 5], "4 of 20 chunks, the oldest leaves"
    assert node.node.match(chains[0]) == 1


def test_what_is_pinned_stays_and_a_round_that_cannot_make_room_says_so(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 5)
    put(node, chain)
    place.age(chain)
    node.pin(chain, 3600, "me")
    summary = place.rounds(Config(max_bytes=place.bytes_of(chain) // 2)).run()
    assert place.cluster.present(chain) == 5
    assert summary.to_json()["kept"]["pinned"]["chunks"] == 5
    assert [said for said in summary.unfinished if "over the high watermark" in said]


def test_two_collectors_with_many_chunks_list_their_own_shards_and_keep_the_bound_together(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_gc.rounds.SHARE_CHUNKS_MIN", 10)
    node, chains = place.cluster.node(), [prompt(number, 1) for number in range(200)]
    for number, chain in enumerate(chains):
        put(node, chain)
        place.age(chain, LONG_S + 60 * number)
    used = sum(map(place.bytes_of, chains))
    collectors = [
        place.rounds(Config(max_bytes=used), shards=lambda count, odd=odd: range(odd, count, 2))  # type: ignore[misc]
        for odd in (0, 1)
    ]
    summaries = [each.run() for each in collectors]
    assert [summary.scanned.count < 130 for summary in summaries] == [True, True], "each lists about half"
    left = sum(map(place.bytes_of, chains))
    assert 0.75 * used < left < 0.85 * used
    assert all(summary.reaped.count > 10 for summary in summaries)


def test_a_quota_counts_for_its_namespaces(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 10)
    put(node, chain)
    share = Share(SPACE.tenant, None, place.bytes_of(chain) // 2)
    summary = place.rounds(Config(shares=(share,))).run()
    assert set(summary.to_json()["chosen"]) == {"over quota"}
    assert 0 < place.bytes_of(chain) <= 0.8 * share.max_bytes


def test_a_dry_run_says_the_same_and_changes_nothing_at_all(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 6)
    put(node, chain)
    place.age(chain)
    place.rounds().run()  # what the first round makes is there
    root, meta = FaultyRoot(place.cluster.root), FaultyMeta(MemoryMeta(place.cluster.store))
    tree, keys = place.tree(), MemoryMeta(place.cluster.store).list("/kv/")
    explain = [chain.addresses[0], chain.addresses[5], prompt(9, 1).addresses[0]]
    rounds = place.rounds(Config(max_bytes=place.bytes_of(chain) // 2), root=root, meta=meta)
    summary = rounds.dry_run(examples_max=2, explain=explain)
    assert place.tree() == tree
    assert MemoryMeta(place.cluster.store).list("/kv/").revision == keys.revision
    assert not set(root.calls) & {"stage", "publish", "discard", "touch", "move", "make_folder", "remove"}
    assert [each.address for each in summary.examples] == [chain.addresses[5].hex(), chain.addresses[4].hex()]
    assert [(each.goes, each.reason) for each in summary.explained] == [
        (False, "within capacity"),
        (True, "over capacity"),
    ]
    done = place.rounds(Config(max_bytes=place.bytes_of(chain) // 2)).run()
    assert done.to_json()["chosen"] == summary.to_json()["chosen"]
    assert done.used_after_bytes == summary.used_after_bytes


def test_a_collector_does_not_run_on_an_etcd_that_does_not_know_the_root(place: Place) -> None:
    put(place.cluster.node(), prompt(1, 3))
    foreign = MemoryMeta()
    for run in (place.rounds(Config(ttl_s=0), meta=foreign).run, place.rounds(Config(ttl_s=0), meta=foreign).dry_run):
        with pytest.raises(RootMismatch, match="fsck"):
            run()
    assert place.cluster.present(prompt(1, 3)) == 3


def test_a_round_stopped_in_its_middle_is_finished_by_the_next(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 8)
    put(node, chain)
    place.age(chain)

    striking = Rule("move", Hang(), nth=3, times=1)
    root = FaultyRoot(place.cluster.root, [striking])
    config, first = Config(ttl_s=60), Place(place.cluster)
    rounds = first.rounds(config, root=root)
    crashed = threading.Thread(target=lambda: _quietly(rounds.run), daemon=True)
    crashed.start()
    assert isinstance(striking.fault, Hang) and striking.fault.reached.wait(PATIENCE_S)
    summary = place.rounds(config).run()
    assert summary.sweeps["adopted"] > 0 and summary.unfinished == []
    striking.fault.release.set()
    crashed.join(PATIENCE_S)
    assert place.cluster.present(chain) == 0
    place.rounds(config).run()
    assert place.cluster.leftovers() == []


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except Unavailable:
        pass


def test_the_wish_to_end_during_a_grace_leaves_the_root_as_it_was(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 4)
    put(node, chain)
    place.age(chain)
    hold = node.node.hold(chain)
    ended: list[type[BaseException]] = []

    def run() -> None:
        try:
            place.rounds(Config(ttl_s=60)).run()
        except Stopped as stopped:
            ended.append(type(stopped))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: node.node.gc_view.leading(chain.addresses) < 4)
    place.stop.ask()
    thread.join(PATIENCE_S)
    assert ended == [Stopped] and place.cluster.present(chain) == 4
    node.node.release(hold)
    assert place.cluster.leftovers() == []


def test_without_any_limit_nothing_is_deleted_and_that_is_said_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    put(place.cluster.node(), prompt(1, 3))
    rounds = place.rounds()
    with caplog.at_level(logging.WARNING, "kvstore_gc"):
        assert rounds.run().chosen == {} and rounds.run().chosen == {}
    assert [record.message.split()[0] for record in caplog.records] == ["gc.no_limit"]


def test_the_room_of_the_file_system_is_the_limit_where_none_is_given() -> None:
    files = MemoryFiles(capacity_bytes=100_000)
    with cluster(MemoryRoot(files)) as made:
        place, chains = Place(made), [prompt(number, 10) for number in range(2)]
        node = made.node()
        put(node, chains[0])
        place.age(chains[0])
        put(node, chains[1])
        files.capacity_bytes = files.used_bytes + 1000
        summary = place.rounds().run()
        assert summary.capacity_bytes is not None and summary.capacity_bytes < files.capacity_bytes
        assert summary.reaped.count > 0 and made.present(chains[1]) == 10


# Several collectors


def test_shards_are_shared_and_change_hands_only_where_they_must() -> None:
    ids = [SessionId(bytes([number]) * 16) for number in range(4)]
    before = [owner(shard, ids) for shard in range(1000)]
    after = [owner(shard, ids[:3]) for shard in range(1000)]
    assert all(200 < before.count(one) < 300 for one in ids)
    assert all(new == old for old, new in zip(before, after, strict=True) if old != ids[3])


def test_each_shard_is_one_live_collector_s() -> None:
    clock, ids = FakeClock(), CountingIds()
    store = MemoryStore(clock)
    one, two = (Collectors(site_of(MemoryMeta(store), clock=clock, ids=ids)) for _ in range(2))
    with pytest.raises(Unavailable, match="joins again"):
        one.shards(16)
    one.beat()
    assert one.shards(16) == list(range(16))
    two.beat()
    shared = one.shards(16) + two.shards(16)
    assert sorted(shared) == list(range(16)) and 0 < len(one.shards(16)) < 16
    two.close()
    assert one.shards(16) == list(range(16))
    clock.advance(TTL_S)
    assert one.me is None
    with pytest.raises(Unavailable):
        one.shards(16)
    one.beat()
    assert one.shards(16) == list(range(16)), "under a new id"


def test_the_smallest_limit_of_the_collectors_holds_for_all_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, ids = FakeClock(), CountingIds()
    store = MemoryStore(clock)
    one, two, three = (
        Collectors(site_of(MemoryMeta(store), clock=clock, ids=ids), max_bytes) for max_bytes in (100, None, 50)
    )
    one.beat()
    two.beat()
    assert (one.smallest_bytes, two.smallest_bytes) == (None, 100)
    three.beat()
    for _ in range(3):
        clock.advance(TTL_S / 3)
        for each in (one, two, three):
            each.beat()
    assert (one.smallest_bytes, two.smallest_bytes, three.smallest_bytes) == (50, 50, 100)
    said = [record.message for record in caplog.records if record.message.startswith("gc.smaller_limit")]
    assert len(said) == 3, "two of it, when one was there, and one and two of three"
    three.close()
    one.look()
    assert one.smallest_bytes is None


def test_a_collector_costs_a_keepalive_and_a_look_at_the_others_in_a_third_of_its_ttl() -> None:
    clock = FakeClock()
    meta = MemoryMeta(MemoryStore(clock))
    one = Collectors(site_of(meta, clock=clock))
    one.beat()
    joined = meta.operations_count
    for _ in range(TTL_S):
        clock.advance(1)
        one.beat()
    assert meta.operations_count - joined == 6


def test_a_collector_whose_put_stayed_unknown_is_listed_once() -> None:
    clock, keys = FakeClock(), Keys(bytes(16))
    meta = FaultyMeta(MemoryMeta(MemoryStore(clock)))
    meta.add(MetaRule(Fault.REPLY_LOST, ("put",), times=1))
    one = Collectors(site_of(meta, clock=clock))
    with pytest.raises(Unavailable):
        one.beat()
    one.beat()
    assert len(meta.list(keys.collectors).items) == 1


def test_two_collectors_empty_a_root_together(place: Place) -> None:
    node, chains = place.cluster.node(), [prompt(number, 6) for number in range(6)]
    for chain in chains:
        put(node, chain)
        place.age(chain)
    halves = (lambda count: range(0, count, 2), lambda count: range(1, count, 2))
    summaries: list[Summary] = []
    threads = [
        threading.Thread(target=lambda h=half: summaries.append(place.rounds(Config(ttl_s=60), shards=h).run()))
        for half in halves
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sum(summary.reaped.count for summary in summaries) == 36
    assert all(summary.reaped.count for summary in summaries)
    assert place.cluster.leftovers() == []


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


def test_a_round_begins_every_interval() -> None:
    driven = Driven()
    driven.run()
    assert driven.began == pytest.approx([0, 30, 60, 90], abs=0.5) and driven.done == ["summary"] * 4


def test_a_full_root_does_not_wait_for_the_interval() -> None:
    driven = Driven(urgent_at={12.0})
    driven.run()
    assert driven.began == pytest.approx([0, 12, 42, 72], abs=0.3)


def test_a_round_that_fails_is_repeated_with_growing_pauses_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven(errors=[Unavailable("etcd did not answer") for _ in range(5)], urgent_at={2.0, 5.0})
    with caplog.at_level(logging.INFO, "kvstore_gc"):
        driven.until_s = 31.5
        driven.run()
    assert driven.began[:6] == pytest.approx([0, 1, 3, 7, 15, 31], abs=0.5) and BACKOFF_S_MIN == 1.0
    assert [record.message.split()[0] for record in caplog.records] == ["gc.round_failed", "gc.round_recovered"]


def test_a_bug_of_ours_is_not_taken_for_an_outage() -> None:
    with pytest.raises(ZeroDivisionError):
        Driven(errors=[ZeroDivisionError()]).run()


# Beside rounds


def watched(root: Root, meta: Meta, clock: FakeClock, watermarks: Watermarks) -> tuple[Watch, Collectors]:
    site = replace(site_of(meta, clock=clock), root=root)
    duties = Duties.of(site, watermarks)
    return Watch(site, watermarks, duties), duties.collectors


def test_a_tick_follows_the_space_keeps_the_place_and_shows_the_sign() -> None:
    files, clock = MemoryFiles(capacity_bytes=1000), FakeClock()
    root, meta, keys = MemoryRoot(files), MemoryMeta(MemoryStore(clock)), Keys(bytes(16))
    marks = Watermarks(None, 0.9)
    watch, collectors = watched(root, meta, clock, marks)
    watch.tick()
    assert collectors.me is not None and not marks.is_urgent
    marks.surveyed(0, marks.mark())
    root.stage(places.staged(bytes(16), 0), [memoryview(bytes(980))], stamp_ns=0, durable=False)
    clock.advance(TICK_S)
    watch.tick()
    assert marks.is_urgent and meta.get(keys.gc_full) is None, "it may be somebody else's: a survey tells"
    lease = meta.grant(60)
    meta.put(keys.usage_of(SessionId(b"n" * 16)), Usage(980, 0).to_json(), lease)
    watch.tick()
    assert marks.level == Level(980, 1000) and meta.get(keys.gc_full) is not None


def test_an_outage_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    root = FaultyRoot(MemoryRoot(), [Rule("space", EIO, times=3)])
    meta = MemoryMeta(MemoryStore(clock))
    watch, _ = watched(root, meta, clock, Watermarks(None, 0.9))
    with caplog.at_level(logging.INFO, "kvstore_gc"):
        for _ in range(5):
            watch.tick()
            clock.advance(1)
    assert [record.message.split()[0] for record in caplog.records] == ["gc.space_failed", "gc.space_recovered"]


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
from tests.root.faulty import FaultyRoot, Hang, Rule
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
collector.serve(1.0, None, print)
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


# Threads


def test_work_is_shared_and_the_first_error_comes_out() -> None:
    threads, seen = Threads(4, Stop()), set[int]()
    threads.each(50, seen.add)
    assert seen == set(range(50))
    threads.each(0, seen.add)

    def fail(number: int) -> None:
        if number == 7:
            raise Unavailable("the seventh")
        seen.add(100 + number)

    with pytest.raises(Unavailable, match="the seventh"):
        threads.each(1000, fail)
    assert len(seen) < 1000, "no more was begun"


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
