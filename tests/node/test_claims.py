"""A node that claims its room while no collector counts (rule S6)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from kvstore.errors import Overloaded, Unavailable
from kvstore.meta.bounds import CLAIMED_SHARE, NO_BOUND, Bound, Bounds
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.usage import Room
from kvstore.node import usage as timings
from kvstore.node.claims import CLAIM_SHARE, EARLY_SHARE, UNBOUND_BYTES, Claims
from kvstore.node.usage import AMPLE_BYTES, KEPT_S, WAITS, NodeUsage
from kvstore.root.posix_errors import DiskFull
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule

KEYS = Keys(bytes(16))
BOUND = 128_000
SIZE = int(CLAIM_SHARE * BOUND)
ASKED = Bound(BOUND)


class Root:
    """A node on a root whose chunks are numbers."""

    def __init__(self, meta: Meta, bound: Bound = ASKED) -> None:
        self.meta = meta
        self.usage = NodeUsage()
        self.usage.begin()
        self.wanted: list[bool] = []
        self.counts = True
        self.is_empty = True
        self.is_clusters = False
        self.free_bytes = 1 << 30
        self.lends_bytes: int | None = None
        """What is left to lend; None: the metadata are not lost."""
        self.has_loans = False
        self.loans: list[tuple[int, int]] = []
        self.claims = self.usage.claiming = Claims(
            Bounds(meta, KEYS),
            bound,
            counts=lambda: self.counts,
            is_empty=lambda: self.is_empty,
            is_clusters=lambda: self.is_clusters,
            has_disk_for=lambda size_bytes: size_bytes <= self.free_bytes,
            wrote=self.wanted.append,
            loans=self,
        )

    # What it lends.

    def is_lost(self) -> bool:
        return not self.counts and self.lends_bytes is not None

    def are_left(self) -> bool:
        return self.has_loans

    def end(self) -> None:
        self.has_loans = False

    def lend(self, size_bytes: int, more_bytes: int) -> int | None:
        if self.lends_bytes is None:
            self.loans.append((size_bytes, more_bytes))
            return more_bytes
        if size_bytes > self.lends_bytes:
            return None
        self.loans.append((size_bytes, more_bytes))
        more_bytes = min(more_bytes, self.lends_bytes - size_bytes)
        self.lends_bytes -= size_bytes + more_bytes
        return more_bytes

    def put(self, size_bytes: int) -> bool:
        """Returns whether the put may begin; then it writes so much."""
        try:
            with self.usage.reserve(size_bytes):
                self.usage.wrote(size_bytes)
        except Overloaded:
            return False
        return True

    def be_counted(self) -> None:
        """A collector says that 100 bytes may be written, and counts the report of this node."""
        self.usage.hear(Room(0, 100, 10, 0.1), 7)
        due = self.usage.due(0.0)
        assert due is not None
        self.usage.told(due, 0, 7, 0.0)

    @property
    def level(self) -> int | None:
        found = self.meta.get(KEYS.level)
        return None if found is None else int(found.value.removeprefix(b'{"bytes":').removesuffix(b"}"))


@pytest.fixture
def meta() -> Iterator[MemoryMeta]:
    made = MemoryMeta()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STARTED_S", "COUNTED_S"):
        monkeypatch.setattr(timings, name, 0.01)


@pytest.mark.parametrize("size_bytes", [1, 700, SIZE, 5 * SIZE])
def test_s6_a_node_writes_no_more_than_was_claimed(meta: MemoryMeta, size_bytes: int) -> None:
    root, written = Root(meta), 0
    while root.put(size_bytes):
        written += size_bytes
        assert root.level is not None and written <= root.level <= CLAIMED_SHARE * BOUND
    assert 0.9 * BOUND < written <= CLAIMED_SHARE * BOUND
    assert root.wanted[0] is False and root.wanted[-1] is True, "now a collector is needed at once"


def test_s6_the_largest_put_that_is_not_refused_at_once_has_room(meta: MemoryMeta) -> None:
    root = Root(meta)
    assert root.put(int(CLAIMED_SHARE * BOUND)) and root.level == CLAIMED_SHARE * BOUND


def test_s6_puts_at_the_same_time_claim_room_for_each(meta: MemoryMeta) -> None:
    root, under_way = Root(meta), []
    with pytest.raises(Overloaded):
        while True:
            under_way.append(root.usage.reserve(3 * SIZE))
            assert root.level is not None and 3 * SIZE * len(under_way) <= root.level
    assert len(under_way) == CLAIMED_SHARE * BOUND // (3 * SIZE)
    for reserved in under_way:
        reserved.release()
        reserved.release()
    level = root.level
    assert root.put(3 * SIZE) and root.level == level, "nothing of it was written: the claims are there still"


def test_s6_room_of_a_put_that_is_dropped_comes_back(meta: MemoryMeta) -> None:
    root = Root(meta)
    root.usage.reserve(int(0.9 * BOUND))
    assert root.put(int(0.9 * BOUND))


def test_s6_room_comes_back_though_the_garbage_collector_runs_under_the_lock(meta: MemoryMeta) -> None:
    root, cycle = Root(meta), list[object]()
    cycle += [cycle, root.usage.reserve(int(0.9 * BOUND))]
    with root.usage._lock:
        del cycle
        gc.collect()
    assert root.put(int(0.9 * BOUND))


def test_s6_a_put_without_room_is_told_why(meta: MemoryMeta, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(meta)
    assert root.claims.refusal() == WAITS
    with monkeypatch.context() as broken:
        broken.setattr(meta, "list", Mock(side_effect=Unavailable("it is damaged: mend it")))
        assert not root.put(SIZE)
        assert "it is damaged: mend it" in root.claims.refusal(), "before the session is known to be lost"
    assert root.put(SIZE) and root.claims.refusal() == WAITS
    root.counts = False
    assert "metadata.sqlite on the root cannot be relied on" in root.claims.refusal()
    root.is_clusters = True
    assert "belongs to a cluster now" in root.claims.refusal() and "open it with etcd=" in root.claims.refusal()


def test_s6_a_claim_that_fails_asks_for_a_collector(meta: MemoryMeta) -> None:
    """Perhaps the disk has no room for metadata, which only a collector mends."""
    faulty = FaultyMeta(meta)
    faulty.add(Rule(Fault.NOT_SENT))
    root = Root(faulty)
    assert not root.put(1) and set(root.wanted) == {False, True}


def test_s7_a_node_looks_until_there_is_ample_room_and_for_ever_once_the_disk_was_full(meta: MemoryMeta) -> None:
    root = Root(meta)
    root.usage.looks, root.free_bytes = True, 99
    with pytest.raises(Overloaded, match="No space left on the disk of this root; this store makes room by itself"):
        root.usage.check_disk(100)
    assert root.wanted == [True], "a collector is needed at once"
    root.free_bytes = 100
    root.usage.check_disk(100)
    assert root.usage.looks
    root.free_bytes += AMPLE_BYTES
    root.usage.check_disk(100)
    assert not root.usage.looks
    refused = root.usage.refusal(DiskFull("could not write it: no space"))
    assert "could not write it: no space; this store makes room by itself" in str(refused)
    root.usage.check_disk(100)
    assert root.usage.looks, "there is ample room now, but it was full before"


def test_a_full_disk_says_what_helps_a_store_that_collects_nothing(meta: MemoryMeta) -> None:
    refused = Root(meta, NO_BOUND).usage.refusal(DiskFull("could not write it"))
    assert "max_bytes=None" in str(refused) and "kvstore-gc --root" in str(refused)
    alone = DiskFull("could not write it")
    assert NodeUsage().refusal(alone) is alone, "a node of a cluster: its collectors are elsewhere"


def test_s6_many_short_programs_together_stay_below_the_bound(meta: MemoryMeta) -> None:
    written = 0
    while True:
        root = Root(meta)
        root.is_empty = not written
        if not root.put(5_000):
            break
        written += 5_000
        root.usage.close()
        assert root.level == written, "the rest of its claim goes back"
    assert 0.9 * BOUND < written <= CLAIMED_SHARE * BOUND


def test_s6_what_a_put_wrote_beyond_its_size_goes_to_the_level(meta: MemoryMeta) -> None:
    """Encodings may make a file longer."""
    root = Root(meta)
    assert root.put(1)
    root.usage.wrote(SIZE + 4)
    root.usage.close()
    assert root.level == 1 + SIZE + 4


def test_s6_what_a_put_wrote_beyond_its_claim_is_claimed_though_no_other_follows(meta: MemoryMeta) -> None:
    """Or another process fills the root as if that were not there."""
    root = Root(meta)
    root.usage.wrote(BOUND // 2)
    assert root.level is None and root.usage.due(0.0) is None
    assert root.level == BOUND // 2 + SIZE
    assert root.usage.due(0.0) is None and root.level == BOUND // 2 + SIZE, "once"


def test_s6_nobody_claims_where_the_level_is_unknown(meta: MemoryMeta) -> None:
    root = Root(meta)
    root.is_empty = False
    assert not root.put(1) and root.level is None and root.wanted == [False, True]


def test_s6_a_word_replaces_the_claims_until_no_collector_is_left(meta: MemoryMeta) -> None:
    root = Root(meta)
    assert root.put(10)
    root.usage.hear(Room(0, 100, 10, 0.1), 7)
    assert not root.put(80), "that collector has not counted this node"
    due = root.usage.due(0.0)
    assert due is not None
    root.usage.told(due, 0, 7, 0.0)
    assert root.put(80)
    level = root.level
    assert level == SIZE + 10
    root.usage.close()
    assert root.level == level, "a collector has counted since: nothing of the claim goes back"
    root.usage.hear(None)
    root.usage.due(0.0)
    root.usage.due(KEPT_S)
    assert root.put(10) and root.level == 2 * SIZE + 20, "it had to claim again"


def test_s6_the_smallest_bound_of_all_stores_counts(meta: MemoryMeta) -> None:
    root = Root(meta)
    lease = meta.grant(60)
    Bounds(meta, KEYS).put(SessionId(bytes(16)), lease, Bound(1_000))
    written = 0
    while root.put(50):
        written += 50
    assert 850 <= written <= 950
    meta.revoke(lease)
    assert root.put(50)


def test_s6_a_node_without_a_bound_counts_for_others(meta: MemoryMeta) -> None:
    root = Root(meta, NO_BOUND)
    assert root.put(1 << 40) and (root.level or 0) >= 1 << 40
    assert not Root(meta).put(1)
    assert root.put(1 << 40) and (root.level or 0) >= 2 << 40


def test_s6_a_node_that_lost_the_metadata_goes_on_for_a_moment_and_claims_it_later(meta: MemoryMeta) -> None:
    root, written = Root(meta), 0
    assert root.put(SIZE)
    root.counts = False
    while written < BOUND and root.put(100):
        written += 100
    assert 0 < written <= EARLY_SHARE * BOUND + SIZE, "nobody collects: it does not go on for ever"
    before = root.level
    root.counts = True
    assert root.put(100) and root.level is not None and before is not None
    assert root.level >= before + written, "all that it wrote meanwhile counts now"


def test_s6_what_was_lent_is_not_given_back_and_what_was_written_of_it_counts(meta: MemoryMeta) -> None:
    root = Root(meta)
    assert root.put(SIZE)
    root.counts = False
    left_bytes = SIZE  # of its claim
    assert root.put(left_bytes + 1)
    root.counts = True
    root.usage.close()
    assert root.level == 2 * SIZE + 1


def test_s6_no_put_without_metadata_is_larger_than_what_is_lent(meta: MemoryMeta) -> None:
    root = Root(meta)
    assert root.put(SIZE)
    root.counts = False
    assert not root.put(int(EARLY_SHARE * BOUND) + SIZE + 1)
    assert root.put(int(EARLY_SHARE * BOUND) + SIZE)
    assert not root.put(1)


def test_s8_a_program_borrows_where_the_metadata_are_lost(meta: MemoryMeta) -> None:
    root = Root(meta)
    root.counts, root.lends_bytes = False, 10 * SIZE
    written = 0
    while root.put(100):
        written += 100
    assert 9 * SIZE < written <= 10 * SIZE and root.loans[0] == (100, SIZE)
    root.counts, before = True, written
    assert root.put(100) and (root.level or 0) >= before + 100, "all of its loans are part of the claim"


def test_s8_a_first_loan_has_what_is_left_of_a_claim_and_the_next_has_not(meta: MemoryMeta) -> None:
    root = Root(meta)
    with root.usage.reserve(7 * SIZE):  # begins, and may write all of it
        root.counts, root.lends_bytes = False, 1 << 30
        assert root.put(SIZE + 1)
        assert root.put(2 * SIZE)
    assert root.loans == [(8 * SIZE + 1, SIZE), (SIZE, SIZE)]


def test_s8_a_moment_is_a_loan_as_well(meta: MemoryMeta) -> None:
    """Or each of many programs writes as much beside the others, and nobody counts it."""
    root = Root(meta)
    assert root.put(2 * SIZE)
    root.counts = False
    moment = int(EARLY_SHARE * BOUND)
    assert root.put(SIZE + 1) and root.loans == [(SIZE + 1 - SIZE + SIZE, moment - 1)], "and what is left of its claim"
    assert not root.put(moment), "once"
    root.lends_bytes = SIZE
    assert root.put(moment) and len(root.loans) == 2, "but where the metadata are lost"


def test_s8_no_moment_is_lent_where_the_bound_leaves_none(meta: MemoryMeta) -> None:
    root = Root(meta)
    assert root.put(1)
    root.counts, root.lends_bytes = False, 0
    root.is_lost = lambda: False  # type: ignore[method-assign]
    assert not root.put(2 * SIZE) and not root.loans


def test_s8_no_level_is_known_while_loans_are_left(meta: MemoryMeta) -> None:
    root = Root(meta)
    assert root.put(SIZE) and root.level is not None
    root.has_loans, root.is_empty = True, False
    assert not root.put(2 * SIZE) and root.level is None and root.wanted[-1], "a collector counts"
    assert not root.has_loans


def test_s8_the_last_word_of_a_collector_binds_no_node_whose_metadata_are_lost(meta: MemoryMeta) -> None:
    root = Root(meta)
    root.be_counted()
    root.lends_bytes = 10 * SIZE
    assert root.put(100) and not root.put(1) and not root.loans, "it has a session"
    root.usage.end()
    root.counts = False
    assert root.put(200) and root.loans == [(200, SIZE)], "no moment: the word allowed as much"
    assert not root.put(10 * SIZE) and root.put(SIZE)


def test_s8_without_a_loan_the_last_word_stays_in_force(meta: MemoryMeta) -> None:
    root = Root(meta)
    root.be_counted()
    assert root.put(60)
    root.usage.end()
    root.counts = False
    assert not root.put(50) and root.put(40) and not root.put(1)


def test_s8_a_loan_that_fails_is_none(meta: MemoryMeta, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(meta)
    root.counts = False
    root.lends_bytes = 1 << 30
    monkeypatch.setattr(root, "lend", Mock(side_effect=Unavailable("the disk hangs")))
    assert not root.put(1) and "nothing can be lent of the bound: the disk hangs" in root.claims.refusal()
    monkeypatch.setattr(root, "is_lost", Mock(side_effect=Unavailable("the disk hangs")))
    assert not root.put(1)


def test_s6_no_level_begins_beside_a_word_though_the_root_is_empty(meta: MemoryMeta) -> None:
    meta.put(KEYS.gc_room, Room(0, 100, 10, 0.1).to_json())
    root = Root(meta)
    assert not root.put(1) and root.level is None, "others may write what the word allows"
    meta.delete(KEYS.gc_room)
    assert root.put(1)


def test_s6_a_collector_that_ends_adds_its_level_to_one_that_has_begun(meta: MemoryMeta) -> None:
    root = Root(meta)
    assert root.put(1)
    Bounds(meta, KEYS).leave(300)
    assert root.level == 1 + SIZE + 300


def test_s6_a_program_that_never_had_the_metadata_writes_nothing_beyond_its_bound(meta: MemoryMeta) -> None:
    for _ in range(3):
        root = Root(meta)
        root.counts = False
        assert not root.put(1) and root.level is None


def test_s6_a_node_without_a_bound_goes_on_without_metadata_and_claims_it_later(meta: MemoryMeta) -> None:
    root = Root(meta, NO_BOUND)
    root.counts = False
    assert root.put(1 << 30) and root.put(1 << 30) and root.level is None
    root.counts = True
    assert root.put(1 << 30) and (root.level or 0) >= 3 << 30


def test_s6_a_process_that_writes_much_wants_a_collector_early(meta: MemoryMeta) -> None:
    root = Root(meta)
    written = 0
    while True not in root.wanted:
        assert root.put(500)
        written += 500
    assert written <= EARLY_SHARE * BOUND + SIZE


def test_s6_a_claim_that_failed_is_made_again_while_the_put_waits(
    meta: MemoryMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was busy for longer than a claim waits for the metadata."""
    monkeypatch.setattr(timings, "STARTED_S", 60.0)
    monkeypatch.setattr(timings, "AGAIN_S", 0.01)
    root, failures = Root(meta), [Unavailable("slow")]
    claim = Bounds.claim

    def slow(bounds: Bounds, *given: Any) -> Any:
        if failures:
            raise failures.pop()
        return claim(bounds, *given)

    monkeypatch.setattr(Bounds, "claim", slow)
    assert root.put(700) and not failures


def test_s6_where_nobody_asks_for_a_bound_one_claim_is_for_many_puts(meta: MemoryMeta) -> None:
    root, levels = Root(meta, NO_BOUND), set[int | None]()
    for _ in range(UNBOUND_BYTES >> 24):
        assert root.put(1 << 24)
        levels.add(root.level)
    assert levels == {UNBOUND_BYTES + (1 << 24)}
