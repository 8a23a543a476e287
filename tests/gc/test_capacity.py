"""The level between two listings, the headroom, and the record that collectors publish."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.clock import RandomIds
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session
from kvstore.meta.store import WatchLost
from kvstore.meta.usage import Capacity, UsageReport
from kvstore.root.interface import StorageSpace
from kvstore.root.memory import MemoryRoot
from kvstore_gc.capacity import GROWTH_S, LATE_S, TICK_S, Accounts, Level, Pressure
from kvstore_gc.membership import TTL_S, Collectors
from tests.kit.clusters import site_of
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.followers import HookedMeta, nothing
from tests.kit.patience import PATIENCE_S

ONE, TWO = SessionId(b"1" * 16), SessionId(b"2" * 16)
MIB = 1 << 20


def used(accounts: Accounts) -> int:
    assert accounts.level is not None
    return accounts.level.used_bytes


def scanned(accounts: Accounts, used_bytes: int, *silent: SessionId) -> None:
    accounts.begin_listing(frozenset(silent))
    accounts.end_listing(used_bytes)


# The level


def test_a_level_exists_once_a_root_with_a_limit_was_listed() -> None:
    accounts = Accounts(None)
    scanned(accounts, 500)
    assert accounts.level is None and not accounts.is_known
    accounts.measured(StorageSpace(None, 300))
    assert accounts.level is not None and accounts.level.capacity_bytes == 800


def test_reports_since_a_listing_count_and_those_before_do_not() -> None:
    clock = FakeClock()
    accounts = Accounts(10_000, clock)
    accounts.reported(ONE, UsageReport(700, 100))
    scanned(accounts, 1000)
    assert used(accounts) == 1000
    clock.advance(LATE_S)
    accounts.reported(ONE, UsageReport(900, 150))
    accounts.reported(TWO, UsageReport(40, 0))
    accounts.deleted(300)
    assert used(accounts) == 1000 + 200 - 50 + 40 - 300


def test_writes_during_a_listing_count_twice_and_deletions_not() -> None:
    clock = FakeClock()
    accounts = Accounts(10_000, clock)
    accounts.reported(ONE, UsageReport(100, 0))
    accounts.begin_listing()
    accounts.reported(ONE, UsageReport(150, 20))
    accounts.deleted(70)
    accounts.end_listing(1000)
    assert used(accounts) == 1050
    accounts.reported(ONE, UsageReport(150, 30))
    assert used(accounts) == 1050, "the report may be late, and the listing without those"
    clock.advance(LATE_S)
    accounts.reported(ONE, UsageReport(150, 35))
    assert used(accounts) == 1045


def test_an_ended_reporter_counts_until_the_next_listing() -> None:
    accounts = Accounts(10_000)
    scanned(accounts, 1000)
    accounts.reported(ONE, UsageReport(200, 0))
    accounts.ended(ONE)
    assert used(accounts) == 1200
    scanned(accounts, 1200)
    assert used(accounts) == 1200


def test_an_unheard_node_counts_from_its_first_report() -> None:
    accounts = Accounts(10_000)
    scanned(accounts, 1000, ONE)
    accounts.reported(ONE, UsageReport(5000, 0))
    assert used(accounts) == 1000
    accounts.reported(ONE, UsageReport(5300, 0))
    assert used(accounts) == 1300


@given(st.lists(st.tuples(st.sampled_from(("write", "report", "scan", "delete")), st.integers(1, 100)), max_size=40))
def test_a_level_is_never_below_what_was_reported(steps: list[tuple[str, int]]) -> None:
    accounts = Accounts(1 << 40, FakeClock())
    on_root = written = reported = 0
    scanned(accounts, 0)
    for step, size in steps:
        if step == "write":
            written, on_root = written + size, on_root + size
        elif step == "report":
            accounts.reported(ONE, UsageReport(written, 0))
            reported = written
        elif step == "scan":
            scanned(accounts, on_root)
        elif on_root >= size:
            accounts.deleted(size)
            on_root -= size
        assert used(accounts) >= on_root - (written - reported)


# The headroom and the credit


def test_the_headroom_is_a_share_of_the_capacity_or_two_puts() -> None:
    accounts = Accounts(1000 * MIB)
    scanned(accounts, 0)
    assert accounts.level == Level(0, 1000 * MIB, 50 * MIB)
    accounts.reported(ONE, UsageReport(0, 0, 40 * MIB))
    assert accounts.level == Level(0, 1000 * MIB, 80 * MIB)
    accounts.reported(ONE, UsageReport(0, 0, 900 * MIB))
    assert accounts.level == Level(0, 1000 * MIB, 250 * MIB), "a quarter at most"


def test_the_headroom_grows_while_nodes_lack_credit() -> None:
    clock = FakeClock()
    accounts = Accounts(1000, clock)
    scanned(accounts, 990)
    sizes = []
    for _ in range(10):
        assert accounts.record(0, 1).credit_bytes == 0 and accounts.level is not None
        sizes.append(accounts.level.headroom_bytes)
        clock.advance(GROWTH_S)
        accounts.measured(StorageSpace(None, None))
    assert sizes[0] == 50 and sizes == sorted(sizes) and sizes[-1] == 250
    scanned(accounts, 0)
    for _ in range(20):
        clock.advance(GROWTH_S)
        accounts.measured(StorageSpace(None, None))
    assert accounts.level is not None and accounts.level.headroom_bytes == 50


@given(st.integers(0, 2000), st.integers(1, 250))
def test_all_credits_fit_below_the_capacity(used_bytes: int, headroom_bytes: int) -> None:
    level = Level(used_bytes, 1000, headroom_bytes)
    half_bytes = headroom_bytes // 2
    assert 0 <= level.spare_bytes <= half_bytes
    assert not level.spare_bytes or used_bytes + level.spare_bytes <= 1000 - half_bytes
    assert level.excess_bytes == max(0, used_bytes - (1000 - headroom_bytes))
    assert level.excess_bytes or level.spare_bytes == half_bytes


def test_a_root_is_full_once_nothing_can_be_evicted() -> None:
    accounts = Accounts(1000)
    scanned(accounts, 990)
    assert not accounts.is_full
    accounts.blocked()
    assert accounts.is_full
    accounts.deleted(1)
    assert not accounts.is_full


# The record


class Cluster:
    """Etcd with sessions that report, and collectors."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.meta = MemoryMetadata(MemoryStore(self.clock))
        self.keys = Keys(bytes(16))

    def session(self) -> Session:
        return Session.open(self.meta, self.keys, clock=self.clock, ids=RandomIds(), ttl_s=3600)

    def report(self, session: Session, written_bytes: int) -> int:
        return self.meta.put(self.keys.usage_of(session.id), UsageReport(written_bytes, 0).to_json(), session.lease)

    def collector(self, max_bytes: int = 1000) -> tuple[Pressure, Accounts]:
        site = site_of(self.meta, clock=self.clock)
        pressure = Pressure(site, max_bytes, Collectors(site))
        return pressure, pressure.accounts

    def later(self, *publishers: Pressure, seconds: float = TICK_S) -> None:
        self.clock.advance(seconds)
        for publisher in publishers:
            publisher.tick()

    @property
    def record(self) -> Capacity | None:
        found = self.meta.get(self.keys.gc_capacity)
        return None if found is None else Capacity.from_json(found.value)


def test_a_record_has_a_credit_once_the_root_was_listed() -> None:
    cluster = Cluster()
    for _ in range(2):
        cluster.session()
    publisher, accounts = cluster.collector()
    publisher.tick()
    assert cluster.record is not None and cluster.record.credit_bytes is None
    scanned(accounts, 100)
    cluster.later(publisher)
    assert cluster.record == Capacity(cluster.record.revision, 100, 1000, 12)


def test_a_record_counts_the_reports_up_to_its_revision() -> None:
    cluster = Cluster()
    node = cluster.session()
    publisher, accounts = cluster.collector()
    scanned(accounts, 0)
    publisher.tick()
    revision = cluster.report(node, 300)
    cluster.later(publisher)
    assert cluster.record == Capacity(revision, 300, 1000, 25)
    revision = cluster.report(node, 970)
    cluster.later(publisher)
    assert cluster.record == Capacity(revision, 970, 1000, 5)
    accounts.deleted(400)
    cluster.later(publisher)
    assert cluster.record == Capacity(revision, 570, 1000, 25), "a deletion is news without a report"
    cluster.meta.revoke(node.lease)
    cluster.later(publisher)
    assert used(accounts) == 570


def test_a_watch_that_was_refused_is_opened_again() -> None:
    cluster = Cluster()
    meta, node = HookedMeta(cluster.meta.store), cluster.session()
    cluster.meta = meta
    publisher, accounts = cluster.collector()
    scanned(accounts, 0)
    publisher.tick()

    def reopen() -> None:
        meta.fetched = nothing

    meta.fetched, meta.opening = Mock(side_effect=WatchLost("the token has expired")), reopen
    revision = cluster.report(node, 400)
    cluster.later(publisher)
    assert cluster.record == Capacity(revision, 400, 1000, 25)


def test_a_node_counts_from_its_first_report_to_a_collector() -> None:
    cluster = Cluster()
    node = cluster.session()
    cluster.report(node, 100)
    publisher, accounts = cluster.collector()
    publisher.tick()
    publisher.before_listing()
    publisher.after_listing(500)
    cluster.report(node, 300)
    cluster.later(publisher)
    assert used(accounts) == 500, "the listing has what was written before"
    cluster.report(node, 310)
    cluster.later(publisher)
    assert used(accounts) == 510


def test_a_collector_that_leads_again_has_to_list_the_root_again() -> None:
    cluster = Cluster()
    (one, accounts), (other, _) = cluster.collector(), cluster.collector()
    one.tick()
    scanned(accounts, 999)
    cluster.later(other, one, seconds=TTL_S)
    assert other.leads and accounts.level is None
    cluster.later(one, seconds=TTL_S)
    assert one.leads and cluster.record is not None and cluster.record.credit_bytes is None


def test_a_hanging_root_ends_the_place_of_its_collector() -> None:
    cluster, hang = Cluster(), Hang()
    root = FaultyRoot(MemoryRoot(), [Rule("space", hang, nth=2)])
    site = replace(site_of(cluster.meta, clock=cluster.clock), root=root)
    collectors = Collectors(site)
    publisher = Pressure(site, None, collectors)
    publisher.tick()
    cluster.clock.advance(TICK_S)
    thread = threading.Thread(target=publisher.tick)
    thread.start()
    assert hang.reached.wait(PATIENCE_S)
    cluster.clock.advance(TTL_S + 1)
    assert publisher.silent_s > TTL_S and collectors.me is None
    assert not cluster.meta.list(cluster.keys.collectors).items, "others take over"
    hang.release.set()
    thread.join(PATIENCE_S)
    assert publisher.silent_s == 0 and collectors.me is not None
