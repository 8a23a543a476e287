"""A node's reports of the room that it takes, and when it stops by itself (gc/PROTOCOL.md, section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.meta.usage import Room, Usage
from kvstore.node.usage import AGAIN_S, ASKED_SHARE, KEPT_S, NodeUsage
from kvstore.root.posix import PosixRoot
from tests.kit.clusters import SPACE, Cluster, cluster, eventually, prompt, put
from tests.kit.followers import SWEEP, Alone
from tests.kit.patience import NEVER_S, PATIENCE_S

STEP, ALLOWED, PACE_S = 10, 100, 0.25


def word(revision: int, allowance: int | None = ALLOWED) -> Room:
    return Room(revision, allowance, STEP, PACE_S)


def bound(*counts: int) -> Usage:
    """The report of a node that has heard a word with an allowance."""
    return Usage(*counts, is_bound=True)


class Reporting:
    """A node's counts in a session, with its own clock; each report gets the next revision."""

    def __init__(self) -> None:
        self.usage = NodeUsage()
        self.usage.begin()
        self.now_s = 0.0
        self._revisions = count(1)

    def put(self, size_bytes: int) -> bool:
        """Returns whether the put may begin without waiting; then it writes so much."""
        try:
            with self.usage.reserve(size_bytes):
                self.usage.wrote(size_bytes)
        except Overloaded:
            return False
        return True

    @property
    def may_put(self) -> bool:
        """True if a put of one byte may begin."""
        try:
            self.usage.reserve()
        except Overloaded:
            return False
        return True

    def hear(self, room: Room | None, created: int = 7) -> None:
        self.usage.hear(room, created)

    def counted(self, allowance: int = ALLOWED) -> None:
        """A collector has counted the first report."""
        self.hear(word(0, None))
        self.hear(word(self.report(0.0), allowance))

    def later(self, seconds: float = 1.0) -> Usage | None:
        self.now_s += seconds
        return self.usage.due(self.now_s)

    def report(self, seconds: float = 1.0) -> int:
        due = self.later(seconds)
        assert due is not None
        revision = next(self._revisions)
        self.usage.told(due, revision, self.usage.asked_by, self.now_s)
        return revision


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Reporting:
    """Its puts do not wait."""
    monkeypatch.setattr("kvstore.node.usage.STARTED_S", 0.0)
    monkeypatch.setattr("kvstore.node.usage.COUNTED_S", 0.0)
    return Reporting()


def wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has puts wait for room."""
    for name in ("STARTED_S", "COUNTED_S"):
        monkeypatch.setattr(f"kvstore.node.usage.{name}", NEVER_S)


def test_a_node_reports_nothing_where_no_collector_asks(node: Reporting) -> None:
    node.usage.wrote(1 << 40)
    node.usage.removed(1 << 40)
    assert node.put(1 << 40)
    assert node.later() is None and node.usage.owes_s == float("inf")


def test_a_node_says_at_once_where_it_begins_and_then_each_step(node: Reporting) -> None:
    node.usage.wrote(5)
    node.hear(word(9))
    assert node.later(0.0) == Usage(5, 0)
    node.report(0.0)
    node.report(0.0)
    node.usage.wrote(STEP - 1)
    assert node.later() is None
    node.usage.wrote(1)
    assert node.later() == bound(5 + STEP, 0)
    node.report()
    node.usage.removed(1)
    assert node.later(PACE_S / 2) is None
    assert node.later(PACE_S / 2) == bound(5 + STEP, 1)


def test_a_node_says_at_once_that_a_word_binds_it(node: Reporting) -> None:
    node.hear(word(9, None))
    assert node.later(0.0) == Usage(0, 0)
    node.report(0.0)
    assert node.later(0.0) is None
    node.hear(word(0))
    assert node.later(0.0) is None, "a word that does not count it may be of a collector that is gone"
    node.hear(word(10))
    assert node.later(0.0) == bound(0, 0)
    node.report(0.0)
    assert node.later(0.0) is None


def test_a_new_word_of_another_collector_is_answered_at_once(node: Reporting) -> None:
    node.hear(word(9))
    node.report()
    node.report(0.0)
    node.hear(word(9))
    assert node.later() is None
    node.hear(None)
    node.hear(word(9), created=9)
    assert node.later(0.0) == bound(0, 0)


def test_a_node_stops_by_itself_until_its_report_was_counted(node: Reporting) -> None:
    node.counted()
    assert node.put(ALLOWED - 1) and not node.put(2) and node.put(1) and not node.may_put
    revision = node.report()
    assert not node.may_put, "no collector has said that it was counted"
    node.hear(word(revision - 1))
    assert not node.may_put
    node.hear(word(revision))
    assert node.may_put
    node.hear(word(revision, 0))
    assert not node.may_put, "the root is full"


def test_a_node_obeys_no_word_that_has_not_counted_it(node: Reporting) -> None:
    """It has no share in that word: nodes that begin while it stands would fill the root together."""
    node.hear(word(0))
    revision = node.report()
    assert not node.may_put
    node.hear(word(revision))
    assert node.put(ALLOWED)


def test_a_word_that_never_counted_a_node_ends_with_its_collector(node: Reporting) -> None:
    node.hear(word(0))
    node.report()
    node.hear(None)
    assert node.put(1 << 40), "no collector limits it"


def test_a_put_counts_before_it_begins_and_what_it_did_not_write_comes_back(node: Reporting) -> None:
    node.counted()
    reserved = node.usage.reserve(ALLOWED - 1)
    assert not node.put(2)
    assert node.later() == bound(0, 0, ALLOWED - 1)
    node.usage.wrote(3)
    assert node.later() == bound(3, 0, ALLOWED - 1), "what is written of it may count twice, until it ends"
    node.report()
    reserved.release()
    assert node.later() == bound(3, 0) and node.put(2)


def test_a_put_of_more_than_x_begins_once_it_is_counted_beside_all_others(
    node: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_ever(monkeypatch)
    node.counted()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(node.usage.reserve, 5 * ALLOWED)
        eventually(lambda: node.later() == bound(0, 0, 0, 5 * ALLOWED))
        revision = node.report()
        node.hear(word(revision - 1))
        node.hear(word(revision, 0))
        assert not waits.done(), "with it the root would be full: collectors make room now"
        node.hear(word(revision))
        assert waits.result(PATIENCE_S).size_bytes == 5 * ALLOWED


def test_puts_that_wait_are_asked_for_in_turn_and_keep_no_smaller_one_from_its_room(
    node: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they might never fit, and room for all of them would empty the root."""
    wait_for_ever(monkeypatch)
    node.counted()
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(node.usage.reserve, 5 * ALLOWED) for _ in range(2))
        eventually(lambda: len(node.usage._waiting) == 2)
        assert node.later() == bound(0, 0, 0, 5 * ALLOWED)
        assert node.put(ALLOWED), "there is room for it now"
        node.hear(word(node.report()))
        eventually(lambda: first.done() or second.done())
        assert not (first.done() and second.done())
        node.usage.end()
        with pytest.raises(Overloaded):
            (second if first.done() else first).result(PATIENCE_S)


def test_small_puts_that_wait_are_asked_for_together(node: Reporting, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_ever(monkeypatch)
    node.counted()
    node.hear(replace(word(9), capacity_bytes=int(20 * ALLOWED / ASKED_SHARE)))
    assert node.put(ALLOWED)
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(node.usage.reserve, 9 * ALLOWED) for _ in range(3)]
        eventually(lambda: node.later() == bound(ALLOWED, 0, 0, 18 * ALLOWED))
        node.usage.end()
        assert all(isinstance(each.exception(PATIENCE_S), Overloaded) for each in waits)


def test_after_a_put_that_got_no_room_others_have_their_turn(node: Reporting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.usage.STARTED_S", NEVER_S)
    monkeypatch.setattr("kvstore.node.usage.COUNTED_S", 0.2)
    node.counted()
    node.hear(replace(word(9, 0), pace_s=0.0))
    with pytest.raises(Overloaded):
        node.usage.reserve(STEP)
    node.usage._waiting[self_made := object()] = STEP
    assert node.usage._asked() == 0, "for as long as that one waited"
    eventually(lambda: node.usage._asked() == STEP)
    del node.usage._waiting[self_made]


def test_what_is_stored_already_needs_no_room(node: Reporting) -> None:
    node.counted(allowance=0)
    assert node.usage.reserve(5 * ALLOWED, lambda: 0).size_bytes == 0
    with pytest.raises(Overloaded):
        node.usage.reserve(5 * ALLOWED, lambda: 1)


def test_a_put_waits_until_its_node_may_report(node: Reporting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many nodes reports every few seconds: a put of more than X would never be counted."""
    monkeypatch.setattr("kvstore.node.usage.STARTED_S", NEVER_S)
    node.counted()
    node.hear(replace(word(9), pace_s=NEVER_S))
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(node.usage.reserve, 5 * ALLOWED)
        eventually(lambda: node.later(NEVER_S) == bound(0, 0, 0, 5 * ALLOWED))
        node.hear(word(node.report(NEVER_S)))
        assert waits.result(PATIENCE_S).size_bytes == 5 * ALLOWED


def test_a_put_whose_report_is_taken_back_gives_no_room_to_the_next(node: Reporting) -> None:
    """Collectors count the report before, or the one after it: nobody knows which when the next word comes."""
    node.counted()
    reserved = node.usage.reserve(ALLOWED)
    first = node.report()
    reserved.release()
    node.report()
    node.hear(word(first))
    assert node.put(ALLOWED) and not node.may_put


def test_a_report_of_puts_under_way_is_followed_by_one_of_none(node: Reporting) -> None:
    node.counted()
    with node.usage.reserve(STEP):
        node.report()
    assert node.later() == bound(0, 0)
    node.report()
    assert node.later() is None and node.usage.owes_s == float("inf")


def test_the_bound_of_a_collector_that_died_lasts_until_another_one_has_counted(node: Reporting) -> None:
    """One that is killed and started again, however often, leaves no time in which writers are free."""
    node.counted()
    assert node.put(ALLOWED)
    node.usage.hear(None)
    assert node.later() is None and node.later(KEPT_S / 2) is None and not node.may_put
    node.usage.hear(word(9, None), created=8)
    revision = node.report()
    assert not node.may_put, "the next collector has not listed the root yet: it counts nothing"
    assert node.later(2 * KEPT_S) is None and not node.may_put, "and may take its time"
    node.usage.hear(word(revision), created=8)
    assert node.may_put


def test_without_any_collector_the_bound_ends(node: Reporting) -> None:
    node.counted(allowance=0)
    assert not node.may_put
    node.usage.hear(None)
    assert node.later() is None and node.later(KEPT_S - 0.1) is None and not node.may_put
    assert node.later(0.2) is None and node.may_put, "nobody waits for a collector that never comes"


def test_a_node_whose_session_ended_keeps_to_the_last_word(node: Reporting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen etcd is no leave to fill the root; and nobody waits for a word that cannot come."""
    wait_for_ever(monkeypatch)
    node.counted()
    node.usage.end()
    assert node.put(ALLOWED) and node.later() is None and not node.may_put
    node.usage.begin()
    node.usage.hear(None)
    assert not node.may_put, "nor is the lease of a collector that ended meanwhile"


def test_a_node_that_waits_reports_again_because_a_restored_etcd_lost_its_report(
    node: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_ever(monkeypatch)
    node.counted()
    assert node.put(ALLOWED)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(node.usage.reserve, STEP)
        eventually(lambda: node.later() == bound(ALLOWED, 0, 0, STEP))
        node.report()
        assert node.later(AGAIN_S / 2) is None
        assert node.later(AGAIN_S / 2) == bound(ALLOWED, 0, 0, STEP)
        node.usage.end()
        with pytest.raises(Overloaded):
            waits.result(PATIENCE_S)


def test_what_the_last_session_did_not_report_is_reported_by_the_next_one(node: Reporting) -> None:
    node.usage.hear(word(0), created=7)
    node.report()
    node.usage.wrote(30)
    node.usage.removed(20)
    node.usage.end()
    assert node.later() is None
    node.usage.wrote(4)
    node.usage.begin()
    node.usage.hear(word(0), created=7)
    assert node.later(0.0) == Usage(34, 0), "deletions would hide writes if they were told twice"


def test_what_was_written_while_nobody_asked_is_no_report_of_the_next_session(node: Reporting) -> None:
    node.usage.wrote(1 << 40)
    node.usage.end()
    node.usage.begin()
    node.usage.hear(word(0), created=7)
    assert node.later(0.0) == Usage(0, 0)


def test_records_that_are_none_are_refused() -> None:
    for value in (
        *(b"", b"x", b"[]", b"{}", b"[" * 100_000, b'{"written":1,"removed":0,"pending":0}'),
        *(b'{"written":-1,"removed":0,"pending":0,"asked":0}', b'{"written":1.5,"removed":0,"pending":0,"asked":0}'),
        b'{"written":1,"removed":0,"pending":-1,"asked":0}',
    ):
        with pytest.raises(InvalidRequest):
            Usage.from_json(value)
        with pytest.raises(InvalidRequest):
            Room.from_json(value)


def test_records_come_back_as_they_were() -> None:
    for usage in (Usage(), Usage(1 << 60, 3), bound(1, 2, 3, 4)):
        assert Usage.from_json(usage.to_json()) == usage
    for room in (word(3), word(0, None), Room(9, None, None, 10.0)):
        assert Room.from_json(room.to_json()) == room


def test_the_later_of_two_records_has_the_larger_counts() -> None:
    first, second = Usage(1, 2, 9), Usage(5, 2, 4)
    assert first.latest(second) == second
    assert second.latest(first) == second, "etcd was restored"
    assert Usage(1).latest(bound(1)) == bound(1)
    assert second.latest(Usage(5, 2, 0)) == Usage(5, 2, 0), "a put ended, and wrote nothing"


# With a follower


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.node.close()


def test_the_word_is_followed_without_a_link_of_the_chain_and_nonsense_is_none(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone.session()
    alone.follower.begin(session)
    monkeypatch.setattr("kvstore.node.usage.STARTED_S", 0.0)
    alone.meta.put(alone.keys.gc_room, word(1 << 40, 0).to_json())
    alone.follower.step(0.0)
    with pytest.raises(Overloaded, match="no collector has counted"):
        alone.view.usage.reserve()
    assert alone.node.stats()["put_refused_uncounted"] == 1
    assert alone.meta.get(alone.keys.usage_of(session.id)) is not None
    alone.meta.put(alone.keys.gc_room, word(0, None).to_json())
    alone.meta.put(alone.keys.gc_room, b"nonsense")
    alone.follower.step(0.0)
    with pytest.raises(Overloaded, match="no collector has counted"):
        alone.view.usage.reserve()
    monkeypatch.setattr("kvstore.node.usage.KEPT_S", 0.0)
    alone.follower.step(0.0)
    alone.follower.step(0.0)
    alone.view.usage.reserve()
    assert alone.view.protects and session.alive


def test_a_report_is_gone_with_its_session(alone: Alone) -> None:
    session = alone.session()
    alone.meta.put(alone.keys.gc_room, word(0).to_json())
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
        alone.meta.put(alone.keys.gc_room, word(0).to_json())
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
    node.meta.put(node.keys.gc_room, Room(0, None, 1, 0.01).to_json())

    def reported() -> Usage | None:
        found = c.store.get(key)
        return None if found is None else Usage.from_json(found.value)

    eventually(lambda: reported() == Usage(size_bytes, 0))
    put(node, chain)
    assert node.clear(SPACE).chunks == 5
    eventually(lambda: reported() == Usage(size_bytes, size_bytes))
