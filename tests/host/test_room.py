"""The room on a root of a host: one number that all processes share, which no put brings above the limit."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.errors import Overloaded, StoreFull
from kvstore.host import tables
from kvstore.host.tables import HoldTable, HostRoom, Number, Own, Shared, live_tables
from tests.kit.host_parts import Parts, child_of

RESERVING = """
from kvstore.host.tables import HostRoom
room = HostRoom(Shared(folder), HoldTable(folder), lambda: None, lambda **_: None)
reserved = room.reserve(100)
room.wrote(30)"""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAIT_S", "START_S", "ANSWER_S"):
        monkeypatch.setattr(tables, name, 0.05)


def test_a_put_gives_back_what_it_did_not_write(parts: Parts) -> None:
    room, shared, numbers = parts.room(), parts.shared, parts.table.numbers
    with room.reserve(100):
        assert (shared[Number.USED], numbers[Own.RESERVED], numbers[Own.PUT_MAX]) == (100, 100, 100)
        room.wrote(30)
        assert numbers[Own.RESERVED] == 70, "what is free if it is killed"
    assert (shared[Number.USED], shared[Number.WRITTEN], numbers[Own.RESERVED]) == (30, 30, 0)
    room.removed(30)
    assert (shared[Number.USED], shared[Number.DELETED]) == (0, 30)


def test_dropped_room_is_free_again(parts: Parts) -> None:
    room = parts.room()
    reserved = room.reserve(100)
    reserved.release()
    reserved.release()
    kept = room.reserve(60)
    del kept
    gc.collect()
    assert parts.shared[Number.USED] == 0
    room.reserve(5).size_bytes = 5  # dropped without being released
    room.close()
    assert parts.shared[Number.USED] == 0


def test_a_closed_room_gives_back_what_hangs(parts: Parts) -> None:
    room = parts.room()
    hanging = room.reserve(100)
    room.wrote(30)
    room.close()
    assert parts.shared[Number.USED] == 30
    hanging.size_bytes = 0


def test_reserved_room_of_a_killed_process_is_free(parts: Parts) -> None:
    child = child_of(parts.folder, RESERVING)
    assert parts.shared[Number.USED] == 100
    child.kill()
    child.communicate()
    live_tables(str(parts.folder), parts.shared)
    assert parts.shared[Number.USED] == 30, "the file that it wrote counts"


def test_writers_together_never_pass_the_limit(parts: Parts) -> None:
    """Of several mappings of one file, as several processes have."""
    parts.limit(100)
    folder, most, lock = str(parts.folder), [0], threading.Lock()
    rooms = [HostRoom(Shared(folder), HoldTable(folder), lambda: None, lambda **_: None) for _ in range(3)]

    def write(room: HostRoom) -> None:
        for _ in range(300):
            if room._take(40):
                with lock:
                    most.append(most[-1] + 40)
                time.sleep(0)  # lets another thread write
                with lock:
                    most.append(most[-1] - 40)
                room._released.append(40)
                room._settle()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, rooms))
    assert 40 <= max(most) <= 100 and parts.shared[Number.USED] == 0
    for room in rooms:
        room._table.close()


def test_a_full_store_wakes_a_collector_and_refuses(parts: Parts) -> None:
    woken, waiting = list[bool](), list[int]()

    def wake(*, at_once: bool) -> None:
        woken.append(at_once)
        waiting.append(parts.table.numbers[Own.WAITING])

    parts.limit(100)
    room = parts.room(wake)
    with room.reserve(80):
        with pytest.raises(Overloaded, match="eviction has not caught up") as late:
            room.reserve(30)
        assert late.value.reason == "overload", "nothing says that all is held"
        parts.shared[Number.FULL] = time.monotonic_ns()
        with pytest.raises(StoreFull, match="nothing can be evicted at the moment"):
            room.reserve(30)
        parts.shared[Number.FULL] = 0
        assert woken[-1] and waiting[-1] == 30 and parts.table.numbers[Own.WAITING] == 0
    room.reserve(30).release()
    with pytest.raises(Overloaded, match="has room for 100 B: put less at a time"):
        room.check(101)


def test_a_flag_of_a_dead_collector_refuses_nothing(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.limit(100)
    room, now_ns = parts.room(), time.monotonic_ns()
    parts.shared[Number.USED] = 100
    parts.shared[Number.FULL] = now_ns
    with pytest.raises(Overloaded, match="nothing can be evicted"):
        room.check(1)
    for flag in (now_ns - 2 * tables.FULL_NS, now_ns + 1000 * tables.FULL_NS, 0):  # also of another boot
        parts.shared[Number.FULL] = flag
        room.check(1)
        assert not room.is_full
