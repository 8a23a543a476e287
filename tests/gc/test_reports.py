"""Reports: what a collector reads in them, tells nodes, and tells other collectors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.format.places import GENERATIONS, HOST_GENERATIONS, Name
from kvstore.meta.bounds import Bound, Bounds
from kvstore.meta.interface import Put
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.memory_store import MemoryStore
from kvstore.meta.session import Session
from kvstore.meta.usage import Room, Usage
from kvstore.sources import RandomIds
from kvstore_gc.capacity import Watermarks
from kvstore_gc.membership import TTL_S, Collectors
from kvstore_gc.reports import Reports
from kvstore_gc.signs import RoomSign, is_news
from kvstore_gc.watch import TICK_S
from tests.kit.cases import for_each
from tests.kit.clusters import site_of
from tests.kit.fake_meta import CountingIds, FakeClock

KEYS = Keys(bytes(16))
NODE = SessionId(b"n" * 16)


class Host:
    """One collector, without threads."""

    def __init__(
        self,
        store: MemoryStore,
        clock: FakeClock,
        ids: CountingIds,
        max_bytes: int | None = 1000,
        generations: Name = GENERATIONS,
    ) -> None:
        self.clock = clock
        self.meta = MemoryMeta(store)
        site = replace(site_of(self.meta, clock=clock, ids=ids), generations=generations)
        self.collectors = Collectors(site)
        self.marks = Watermarks(max_bytes, 0.9, clock)
        self.reports = Reports(site, self.collectors, self.marks)
        self.room = RoomSign(site, self.collectors, self.reports)

    def tick(self, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)
        self.collectors.beat()
        self.reports.follow()
        self.reports.tell()
        self.room.follow(self.marks)

    def survey(self, used: int) -> None:
        self.marks.surveyed(used, self.marks.mark(self.reports.unheard(self.clock.advance)))
        self.clock.advance(self.marks.late_s)

    @property
    def used(self) -> int:
        level = self.marks.level
        assert level is not None
        return level.used_bytes

    @property
    def word(self) -> Room | None:
        found = self.meta.get(KEYS.gc_room)
        return None if found is None else Room.from_json(found.value)


@pytest.fixture
def hosts() -> tuple[Host, Host]:
    clock, ids = FakeClock(), CountingIds()
    store = MemoryStore(clock)
    return Host(store, clock, ids), Host(store, clock, ids)


def report(host: Host, written: int, removed: int = 0, node: SessionId = NODE, pending: int = 0) -> int:
    return host.meta.put(KEYS.usage_of(node), Usage(written, removed, pending).to_json())


def test_reports_are_followed_and_counted_in_the_next_word(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.tick()
    assert one.word == Room(one.reports.revision, None, None, one.word.pace_s if one.word else 0)
    one.survey(100)
    revision = report(one, 300)
    one.tick()
    assert one.used == 400 and one.word is not None
    assert one.word.revision == revision and one.word.allowance_bytes == 25
    one.meta.delete(KEYS.usage_of(NODE))
    one.tick()
    assert one.used == 400, "what it wrote is there"


def test_puts_under_way_are_counted_in_the_next_word(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.tick()
    one.survey(100)
    report(one, 0, pending=860)
    one.tick()
    assert one.used == 960 and one.word is not None and one.word.allowance_bytes == 0
    report(one, 0, pending=800)
    one.tick()
    assert one.word is not None and one.word.allowance_bytes == 25


def test_all_whose_reports_are_counted_have_a_share(hosts: tuple[Host, Host]) -> None:
    """Their sessions may not be counted yet: that is done now and then."""
    one, _ = hosts
    one.tick()
    one.survey(100)
    revisions = [report(one, 0, node=SessionId(bytes([number]) * 16)) for number in range(9)]
    one.tick()
    assert one.word is not None and one.word.revision == revisions[-1] and one.word.allowance_bytes == 5


def test_a_root_where_nothing_happens_costs_no_writes(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.tick()
    one.survey(100)
    one.tick()
    before = one.meta.list(KEYS.prefix).revision
    for _ in range(20):
        one.tick()
    assert one.meta.list(KEYS.prefix).revision == before


def test_a_lost_watch_is_read_afresh(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    other = SessionId(b"o" * 16)
    report(one, 10, node=other)
    one.tick()
    one.survey(100)
    assert one.reports._watch is not None
    one.reports._watch.close()
    report(one, 300)
    report(one, 30, node=other)
    one.meta.delete(KEYS.usage_of(other))
    one.tick()
    one.tick()
    assert one.used == 400, "what was written and gone between is for the next survey"


@pytest.mark.parametrize("value", [b"", b"nonsense", b"[]"])
def test_a_report_that_cannot_be_read_is_none(hosts: tuple[Host, Host], value: bytes) -> None:
    one, _ = hosts
    one.tick()
    one.survey(100)
    one.meta.put(KEYS.usage_of(NODE), value)
    one.meta.put(f"{KEYS.usage}beside", Usage(5).to_json())
    one.tick()
    assert one.used == 100


def test_collectors_hear_of_each_other_s_deletions_and_not_of_their_own(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    one.tick()
    two.tick()
    one.survey(900)
    two.survey(900)
    one.marks.reaped(300)
    one.tick()
    two.tick()
    one.tick()
    assert (one.used, two.used) == (600, 600)
    one.clock.advance(TTL_S)  # both join again
    one.marks.reaped(100)
    one.tick()
    one.marks.reaped(10)
    one.tick()
    two.tick()
    two.tick()
    assert (one.used, two.used) == (490, 590), "what it had not told before it lost its place is for the next survey"


def test_the_word_is_one_collector_s_and_another_one_s_when_that_is_gone(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    one.tick()
    two.tick()
    first = one.meta.get(KEYS.gc_room)
    assert first is not None and one.collectors.me is not None and first.lease == one.collectors.me[1]
    one.collectors.close()
    assert one.word is None
    two.tick(TICK_S)  # at its next tick: nodes write freely meanwhile
    found = two.meta.get(KEYS.gc_room)
    assert found is not None and two.collectors.me is not None and found.lease == two.collectors.me[1]


@pytest.mark.parametrize("is_later", [False, True])
def test_a_word_that_no_lease_ends_is_replaced(hosts: tuple[Host, Host], *, is_later: bool) -> None:
    one = hosts[0]
    if is_later:
        one.tick()
        one.survey(0)
        one.tick()
    one.meta.put(KEYS.gc_room, b"nonsense")
    report(one, 10)
    one.tick()
    one.tick()
    assert one.word is not None and one.word.revision == one.reports.revision


def test_a_collector_that_knows_no_limit_asks_nobody() -> None:
    clock = FakeClock()
    host = Host(MemoryStore(clock), clock, CountingIds(), None)
    host.tick()
    assert host.word is None


def test_a_survey_waits_for_the_nodes_that_are_there_and_for_a_silent_one_once(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.tick()
    session = Session.open(one.meta, KEYS, clock=one.clock, ids=RandomIds(), ttl_s=3600)
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        one.clock.advance(seconds)
        if len(waited) == 3:
            one.meta.txn((), (Put(KEYS.usage_of(session.id), Usage(5000).to_json(), session.lease),))
            one.reports.follow()

    assert one.reports.unheard(pause) == frozenset() and len(waited) == 3
    one.marks.surveyed(100, one.marks.mark())
    assert one.used == 100, "what it wrote before is listed"
    silent = Session.open(one.meta, KEYS, clock=one.clock, ids=RandomIds(), ttl_s=3600)
    waited.clear()
    assert one.reports.unheard(pause) == {silent.id} and waited
    waited.clear()
    assert one.reports.unheard(pause) == {silent.id} and not waited


# A root that the processes of one host share (S6)


@pytest.fixture
def shared() -> Host:
    store, clock = MemoryStore(FakeClock()), FakeClock()
    return Host(store, clock, CountingIds(), generations=HOST_GENERATIONS)


def level(host: Host) -> bytes | None:
    found = host.meta.get(KEYS.level)
    return None if found is None else found.value


def test_s6_the_first_word_ends_all_claims_and_a_collector_that_ends_leaves_the_level(shared: Host) -> None:
    bounds = Bounds(shared.meta, KEYS)
    assert bounds.claim(10, 1000, lambda: True) is not None
    shared.tick()
    assert shared.word is not None and level(shared) is not None, "it has not listed the root yet"
    shared.survey(300)
    shared.tick()
    assert shared.word.allowance_bytes and level(shared) is None
    assert bounds.claim(10, 1000, lambda: False) is None
    shared.room.close(shared.marks)
    assert shared.word is None and level(shared) == b'{"bytes":351}', "with what the word allowed, rounded up"


def test_s6_what_was_claimed_and_not_reported_counts_when_a_collector_ends_soon(shared: Host) -> None:
    bounds = Bounds(shared.meta, KEYS)
    assert bounds.claim(400, 1000, lambda: True) is not None
    shared.tick()
    shared.survey(300)
    shared.tick()
    report(shared, 50)
    shared.tick()
    shared.room.close(shared.marks)
    assert level(shared) == b'{"bytes":501}', "those who claimed 100 more have reported nothing, whoever wrote the 50"


def test_s6_a_collector_that_has_not_counted_leaves_no_level(shared: Host) -> None:
    shared.tick()
    shared.room.close(shared.marks)
    assert level(shared) is None


def test_s6_who_is_gone_since_the_survey_may_have_written_more(shared: Host) -> None:
    lease = shared.meta.grant(60)
    shared.meta.put(KEYS.usage_of(NODE), Usage(5, 0).to_json(), lease)
    shared.tick()
    shared.survey(300)
    shared.tick()
    shared.meta.revoke(lease)
    shared.tick()
    shared.room.close(shared.marks)
    assert level(shared) == b'{"bytes":402}'


def test_s3_what_embedded_stores_ask_for_counts_too(shared: Host) -> None:
    Bounds(shared.meta, KEYS).put(NODE, shared.meta.grant(60), Bound(500, 7.0))
    shared.tick()
    assert (shared.collectors.smallest_bytes, shared.collectors.smallest_ttl_s) == (500, 7.0)


@for_each("used_bytes, news", [(0, True), (110, False), (120, True), (100, False)])
def test_others_hear_of_used_bytes_that_changed_by_an_eighth(used_bytes: int, news: bool) -> None:
    """For people: the allowance stays the same on a root with much room."""
    said = Room(1, 1000, 10, 0.1, 100, 1 << 40)
    assert is_news(said, replace(said, used_bytes=used_bytes)) is news
