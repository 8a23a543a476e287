"""The reserve of a root: when it is spent, and which puts leave its room alone (rule S7 of gc/PROTOCOL.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.core.clock import RandomIds
from kvstore.format import places
from kvstore.root.fences import LOG_BYTES, RESERVE_BYTES, keep_reserve, make_room
from kvstore.root.memory import MemoryFiles, MemoryRoot

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


def test_it_is_spent_only_where_there_is_no_room_for_a_plan(files: MemoryFiles, root: MemoryRoot) -> None:
    leave(files, LOG_BYTES)
    assert make_room(root) and root.stat(places.RESERVE) is not None
    leave(files, LOG_BYTES - 1)
    assert make_room(root) and root.stat(places.RESERVE) is None
    leave(files, 0)
    assert not make_room(root), "it is gone"
