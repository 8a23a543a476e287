"""A node's reports of the space that it uses, and its credit (gc/PROTOCOL.md, section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from kvstore.engine.capacity import KEPT_S, PACE_S_MIN, REPEAT_S, NodeUsage
from kvstore.errors import Overloaded
from kvstore.meta.usage import Capacity, UsageReport
from kvstore.root.posix import PosixRoot
from tests.kit.clusters import SPACE, Cluster, cluster, eventually, prompt, put
from tests.kit.followers import SWEEP, Alone
from tests.kit.patience import NEVER_S, PATIENCE_S

CREDIT = 100


def record(revision: int, credit: int | None = CREDIT, *, is_full: bool = False) -> Capacity:
    return Capacity(revision, 500, 1000, credit, is_full)


class Reporting:
    """A node's counts in a session, with its own clock; each report gets the next revision."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.usage = NodeUsage(wait_s=wait_s)
        self.usage.begin()
        self.now_s = 0.0
        self._revisions = count(1)

    def put(self, size_bytes: int) -> bool:
        """Returns whether the put may begin; then it writes so much."""
        try:
            with self.usage.reserve(size_bytes):
                self.usage.wrote(size_bytes)
        except Overloaded:
            return False
        return True

    def receive(self, capacity: Capacity | None, created: int = 7) -> None:
        self.usage.received(capacity, created)

    def counted(self, credit: int = CREDIT) -> None:
        """A collector counts all that was written."""
        self.receive(record(self.report(), credit))

    def later(self, seconds: float = 10 * REPEAT_S) -> UsageReport | None:
        self.now_s += seconds
        return self.usage.due(self.now_s)

    def report(self, seconds: float = 10 * REPEAT_S) -> int:
        due, revision = self.later(seconds), next(self._revisions)
        if due is not None:
            self.usage.reported(due, revision, self.usage.answers, self.now_s)
        return revision


@pytest.fixture
def node() -> Reporting:
    """Its puts do not wait."""
    return Reporting()


# Reports


def test_a_node_without_a_collector_reports_nothing(node: Reporting) -> None:
    node.usage.wrote(1 << 40)
    assert node.put(1 << 40)
    assert node.later() is None and node.usage.owes_s == float("inf")


def test_a_node_reports_when_a_collector_begins(node: Reporting) -> None:
    node.usage.wrote(5)
    node.receive(record(9, None))
    assert node.later(0.0) == UsageReport(5, 0)
    node.report(0.0)
    assert node.later() is None
    node.receive(record(9, None), created=8)
    assert node.later(0.0) == UsageReport(5, 0), "another collector"


def test_a_node_reports_a_share_of_its_credit_and_the_rest_later(node: Reporting) -> None:
    node.receive(record(9))
    node.report(0.0)
    node.usage.wrote(CREDIT // 4)
    assert node.later(PACE_S_MIN) is None
    node.usage.wrote(1)
    assert node.usage.due(node.now_s, pace_s=0.5) is None
    assert node.later(0.0) == UsageReport(CREDIT // 4 + 1, 0)
    node.report(0.0)
    node.usage.wrote(1)
    assert node.later(PACE_S_MIN) is None and node.later(REPEAT_S) == UsageReport(CREDIT // 4 + 2, 0)
    node.report(0.0)
    node.usage.removed(1)
    assert node.later(PACE_S_MIN) == UsageReport(CREDIT // 4 + 2, 1)


def test_a_node_reports_its_largest_put(node: Reporting) -> None:
    node.receive(record(9))
    for size in (10, 30, 20):
        assert node.put(size)
    assert node.later() == UsageReport(60, 0, 30)


# The credit


def test_a_node_writes_its_credit_beyond_the_counted_report(node: Reporting) -> None:
    node.receive(record(0))
    assert node.put(CREDIT) and not node.put(1)
    revision = node.report()
    assert not node.put(1), "reported and not counted"
    node.receive(record(revision - 1))
    assert not node.put(1)
    node.receive(record(revision))
    assert node.put(CREDIT) and not node.put(1)


def test_puts_under_way_count_until_they_end(node: Reporting) -> None:
    node.receive(record(0))
    with node.usage.reserve(CREDIT):
        assert not node.put(1)
    assert node.put(CREDIT), "it wrote nothing"


def test_a_put_larger_than_the_credit_waits_until_all_is_counted(node: Reporting) -> None:
    node.receive(record(0))
    assert node.put(1) and not node.put(2 * CREDIT)
    node.counted()
    assert node.put(2 * CREDIT) and not node.put(1)
    node.counted(credit=0)
    assert not node.put(2 * CREDIT) and not node.put(1), "no credit at all"


def test_a_credit_outlives_its_collector_for_a_while(node: Reporting) -> None:
    node.receive(record(0))
    node.receive(None)
    assert node.put(CREDIT) and not node.put(1)
    node.receive(record(0, None), created=8)
    assert not node.put(1), "the next collector has not listed the root"
    node.receive(None)
    node.later(0.0)
    node.later(KEPT_S - 1)
    assert not node.put(1)
    node.later(1.0)
    assert node.put(1 << 40)


def test_a_put_waits_for_a_credit() -> None:
    node = Reporting(NEVER_S)
    node.receive(record(0))
    assert node.put(CREDIT)
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(node.put, size) for size in (3 * CREDIT, 1)]
        eventually(lambda: len(node.usage._waiting) == 2)
        node.counted()
        assert waiting[0].result(PATIENCE_S)
        node.counted()
        assert waiting[1].result(PATIENCE_S), "in order: a small put does not overtake a large one"


def test_a_full_root_ends_the_wait() -> None:
    node = Reporting(NEVER_S)
    node.receive(record(0, 0))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(node.put, 1)
        eventually(lambda: len(node.usage._waiting) == 1)
        node.receive(record(0, 0, is_full=True))
        assert not waiting.result(PATIENCE_S)
    assert node.usage.is_full


# Sessions


def test_a_session_reports_what_the_last_one_did_not(node: Reporting) -> None:
    node.receive(record(0))
    node.report()
    node.usage.wrote(30)
    node.usage.removed(20)
    node.usage.end()
    assert node.later() is None
    node.usage.wrote(4)
    node.usage.begin()
    node.receive(record(0))
    assert node.later(0.0) == UsageReport(34, 0), "deletions would hide writes if they were reported twice"


# With a follower


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.node.close()


def test_a_report_is_gone_with_its_session(alone: Alone) -> None:
    session = alone.session()
    alone.meta.put(alone.keys.gc_capacity, record(0).to_json())
    alone.follower.begin(session)
    alone.follower.step(0.0)
    assert len(alone.meta.list(alone.keys.usage).items) == 1
    session.close()
    assert not alone.meta.list(alone.keys.usage).items


def test_a_gap_of_the_chain_is_found_although_other_keys_go_on_changing(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store restored to an older revision: the watch has missed the link, and reports what comes after."""
    session, now_s = alone.session(), alone.follower._clock.monotonic_s()
    alone.follower.begin(session)
    monkeypatch.setattr(alone.follower._clock, "monotonic_s", lambda: now_s)
    following = alone.follower._following
    assert following is not None
    following.watch.close()
    alone.meta.put(alone.keys.gc_seq, SWEEP)
    following.watch = alone.meta.watch(alone.keys.gc, alone.meta.list(alone.keys.gc).revision + 1)
    for _ in range(3):
        now_s += alone.node.limits.gap_check_s
        alone.meta.put(alone.keys.gc_capacity, record(0).to_json())
        alone.follower.step(0.0)
    assert not session.alive


# With a cluster


@pytest.fixture(params=["memory", "files"])
def c(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Cluster]:
    """On files native code publishes."""
    with cluster(PosixRoot(tmp_root) if request.param == "files" else None) as made:
        yield made


def test_what_a_node_puts_and_clears_is_what_it_reports(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 5)
    key = node.keys.usage_of(node.presence.current().id)
    put(node, chain)
    size_bytes = sum(stat.size_bytes for address in chain.addresses if (stat := c.root.stat(c.name(address))))
    assert c.store.get(key) is None, "without garbage collection there are no writes"
    node.meta.put(node.keys.gc_capacity, record(0, None).to_json())

    def reported() -> UsageReport | None:
        found = c.store.get(key)
        return None if found is None else UsageReport.from_json(found.value)

    eventually(lambda: reported() == UsageReport(size_bytes, 0, size_bytes))
    put(node, chain)
    assert node.clear(SPACE).chunks == 5
    eventually(lambda: reported() == UsageReport(size_bytes, size_bytes, size_bytes))
