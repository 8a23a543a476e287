"""The reserve of a root: when it is spent, and which puts leave its room alone (rule S7 of gc/PROTOCOL.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.format import places
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.reserve import (
    LOG_BYTES,
    RESERVE_BYTES,
    begin_spending,
    has_room_for,
    keep_reserve,
    make_room,
    make_room_late,
    spend_reserve,
)
from kvstore.sources import RandomIds

TOTAL_BYTES = 64 * RESERVE_BYTES
PUT_BYTES = 3 * RESERVE_BYTES


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles(capacity_bytes=TOTAL_BYTES)


@pytest.fixture
def root(files: MemoryFiles) -> Iterator[MemoryRoot]:
    made = MemoryRoot(files)
    keep_reserve(made, RandomIds())
    ballast, session = bytes(16 * RESERVE_BYTES), RandomIds().fresh()
    made.stage(places.staged(session, 0), [memoryview(ballast)], stamp_ns=0, durable=False)
    yield made
    made.close()


def leave(files: MemoryFiles, free_bytes: int) -> None:
    """Has other programs take all but so much."""
    files.capacity_bytes = files.used_bytes + free_bytes


def test_a_put_may_begin_while_the_reserve_is_there(files: MemoryFiles, root: MemoryRoot) -> None:
    """If it had to leave room, a put of a tenth of the disk would wait for a collector that has nothing to do."""
    leave(files, 0)
    assert has_room_for(root, PUT_BYTES)


def test_puts_are_told_before_it_is_spent(files: MemoryFiles, root: MemoryRoot) -> None:
    leave(files, LOG_BYTES - 1)
    told: list[bool] = []
    assert make_room_late(root, lambda seconds: told.append(has_room_for(root, PUT_BYTES)))
    assert told == [False] and root.stat(places.RESERVE) is None


def test_a_reserve_that_was_not_spent_after_all_stays(files: MemoryFiles, root: MemoryRoot) -> None:
    """Whoever was about to spend it was killed."""
    leave(files, 0)
    assert begin_spending(root) and not has_room_for(root, PUT_BYTES)
    keep_reserve(root, RandomIds())
    assert has_room_for(root, PUT_BYTES)


def test_while_it_is_spent_a_put_leaves_its_room(files: MemoryFiles, root: MemoryRoot) -> None:
    assert spend_reserve(root)
    for free_bytes in range(RESERVE_BYTES, PUT_BYTES + 2 * RESERVE_BYTES, RESERVE_BYTES // 4):
        leave(files, free_bytes)
        kept_bytes = min(RESERVE_BYTES, files.capacity_bytes // 16 if files.capacity_bytes else 0)
        assert has_room_for(root, PUT_BYTES) == (free_bytes >= PUT_BYTES + kept_bytes)


def test_it_is_spent_only_where_there_is_no_room_for_a_plan(files: MemoryFiles, root: MemoryRoot) -> None:
    leave(files, LOG_BYTES)
    assert not begin_spending(root) and make_room(root) and root.stat(places.RESERVE) is not None
    leave(files, LOG_BYTES - 1)
    assert begin_spending(root) and make_room(root)
    leave(files, 0)
    assert not begin_spending(root) and not make_room(root), "it is gone"


def test_a_disk_too_small_for_a_reserve_is_filled_as_far_as_it_goes() -> None:
    """So a put that does not fit leaves its first chunks there."""
    assert has_room_for(MemoryRoot(MemoryFiles(capacity_bytes=4 << 20)), 8 << 20)
