"""LOCKS.md names every lock, and a thread that takes two against their order is found."""

from __future__ import annotations

import threading

from kvstore.background import Tasks
from kvstore.counts import ClientCount
from kvstore.node.counters import Counts
from tests.kit import locking


def since(before: int) -> list[str]:
    """Returns and forgets the violations since ``before``, which this test provoked."""
    said = locking.violations[before:]
    del locking.violations[before:]
    return said


def test_every_lock_has_a_row_and_every_row_a_lock() -> None:
    rows = locking.ranks()
    assert not sorted(locking.all_locks() - rows.keys()), "LOCKS.md lacks these"
    assert not sorted(rows.keys() - locking.all_locks()), "LOCKS.md has locks that nobody makes"
    assert len(rows) > 90


def test_locks_of_kvstore_know_their_rank() -> None:
    assert isinstance(Counts(ClientCount)._lock, locking.RankedLock)
    assert not isinstance(threading.Lock(), locking.RankedLock), "those of others are as they were"


def test_a_lock_taken_against_the_order_is_found() -> None:
    before = len(locking.violations)
    outer = locking.RankedLock("node.view.View.lock", threading.Lock())
    inner = locking.RankedLock("node.counters.Counts._lock", threading.Lock())
    with outer, inner:
        assert since(before) == []
    with inner, outer:
        (said,) = since(before)
    assert "node.view.View.lock (" in said and "is taken while node.counters.Counts._lock (90) is held" in said


def test_one_that_gives_up_may_be_asked_for_in_any_order() -> None:
    before = len(locking.violations)
    outer = locking.RankedLock("node.view.View.lock", threading.Lock())
    with locking.RankedLock("node.counters.Counts._lock", threading.Lock()):
        assert outer.acquire(timeout=1.0)
        outer.release()
    assert since(before) == []


def test_condition_taken_against_the_order_is_found() -> None:
    before, tasks = len(locking.violations), Tasks("test-locks", 0, 1)
    with locking.RankedLock("node.counters.Counts._lock", threading.Lock()):
        tasks.submit(int)
    (said,) = since(before)
    assert said.startswith("background.Tasks._changed (89) is taken while node.counters.Counts._lock (90)")


def test_condition_entered_twice_is_free_while_waiting() -> None:
    before = len(locking.violations)
    changed = threading.Condition(locking.RankedLock("node.counters.Counts._lock", threading.RLock()))  # type: ignore[arg-type]
    with changed, changed:
        assert not changed.wait(0.001) and len(locking._stack()) == 2
    assert since(before) == [] and locking._stack() == []
