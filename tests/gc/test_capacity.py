"""How full a root is between surveys, when that makes a round urgent, and the sign for nodes."""

from __future__ import annotations

import pytest

from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.memory_store import MemoryStore
from kvstore.root.interface import Space
from kvstore_gc.capacity import SIGN_AGAIN_S, FullSign, Level, Watermarks
from kvstore_gc.collectors import TTL_S, Collectors
from tests.meta.fakes import CountingIds, FakeClock

KEYS = Keys(bytes(16))


def space(free: int | None) -> Space:
    return Space(1000, free)


def test_used_bytes_are_followed_by_free_space() -> None:
    marks = Watermarks(None, 0.9)
    assert marks.level is None
    marks.surveyed(300, space(700))
    assert marks.level == Level(300, 1000)
    marks.followed(space(450))
    assert marks.level == Level(550, 1000)
    marks.followed(space(900))
    assert marks.level == Level(100, 1000)


def test_what_others_have_filled_is_no_room_of_ours() -> None:
    marks = Watermarks(None, 0.9)
    marks.surveyed(300, space(100))  # 600 are somebody else's
    assert marks.level == Level(300, 400)


@pytest.mark.parametrize(("max_bytes", "free", "capacity"), [(500, 700, 500), (500, 100, 400), (500, None, 500)])
def test_a_limit_counts_as_far_as_there_is_room(max_bytes: int, free: int | None, capacity: int) -> None:
    marks = Watermarks(max_bytes, 0.9)
    marks.surveyed(300, Space(None, free))
    assert marks.level == Level(300, capacity)


def test_without_room_and_limit_nothing_is_known() -> None:
    marks = Watermarks(None, 0.9)
    marks.surveyed(300, Space(None, None))
    assert marks.level is None and not marks.is_urgent


def test_a_root_that_cannot_tell_its_free_space_counts_what_was_reaped() -> None:
    marks = Watermarks(1000, 0.9)
    marks.surveyed(950, Space(None, None))
    marks.reaped(200)
    assert marks.level == Level(750, 1000)
    known = Watermarks(1000, 0.9)
    known.surveyed(950, space(50))
    known.reaped(200)
    assert known.level == Level(950, 1000), "free space tells by itself"


def test_a_round_is_urgent_once_over_the_high_watermark_and_again_only_after_growth() -> None:
    marks = Watermarks(None, 0.9)
    marks.surveyed(850, space(150))
    marks.settled()
    assert not marks.is_urgent
    marks.followed(space(80))
    assert marks.is_urgent
    marks.surveyed(920, space(80))
    marks.settled()  # nothing could be deleted
    assert not marks.is_urgent
    marks.followed(space(75))
    assert not marks.is_urgent, "grown by half a per cent"
    marks.followed(space(70))
    assert marks.is_urgent


class Host:
    """One collector with its sign."""

    def __init__(self, store: MemoryStore, clock: FakeClock, ids: CountingIds) -> None:
        self.meta = MemoryMeta(store)
        self.collectors = Collectors(self.meta, KEYS, clock=clock, ids=ids)
        self.collectors.beat()
        self.sign = FullSign(self.meta, KEYS, self.collectors, clock)
        self.marks = Watermarks(1000, 0.9)

    def at(self, used: int) -> bool:
        """Whether the sign is there when this much is used."""
        self.marks.surveyed(used, Space(None, None))
        self.sign.follow(self.marks)
        return self.meta.get(KEYS.gc_full) is not None


@pytest.fixture
def hosts() -> tuple[Host, Host, FakeClock]:
    clock, ids = FakeClock(), CountingIds()
    store = MemoryStore(clock)
    return Host(store, clock, ids), Host(store, clock, ids), clock


def test_the_sign_comes_at_the_stop_mark_and_goes_below_the_high_one(hosts: tuple[Host, Host, FakeClock]) -> None:
    one = hosts[0]
    assert [one.at(used) for used in (940, 951, 940, 901, 900, 940)] == [False, True, True, True, False, False]


def test_the_sign_comes_again_at_once_when_the_root_fills_again_at_once(hosts: tuple[Host, Host, FakeClock]) -> None:
    one = hosts[0]
    assert [one.at(used) for used in (990, 100, 990, 100, 990)] == [True, False, True, False, True]


def test_the_sign_costs_a_write_when_it_changes_and_nothing_in_between(hosts: tuple[Host, Host, FakeClock]) -> None:
    one = hosts[0]
    one.at(990)
    before = one.meta.operations_count
    one.sign.follow(one.marks)
    one.sign.follow(one.marks)
    assert one.meta.operations_count == before


def test_of_two_collectors_one_has_the_sign_and_only_that_one_takes_it_back(
    hosts: tuple[Host, Host, FakeClock],
) -> None:
    one, two, _ = hosts
    assert one.at(990) and two.at(990)
    assert two.at(100), "it is the other one's"
    assert not one.at(100)


def test_the_sign_ends_with_its_collector_and_another_one_puts_it_again(hosts: tuple[Host, Host, FakeClock]) -> None:
    one, two, clock = hosts
    assert one.at(990) and two.at(990)
    for _ in range(4):  # the second one stays, the first one has died
        clock.advance(TTL_S / 3)
        two.collectors.beat()
    assert two.meta.get(KEYS.gc_full) is None
    clock.advance(SIGN_AGAIN_S)
    assert two.at(990)


def test_the_sign_goes_when_its_collector_leaves(hosts: tuple[Host, Host, FakeClock]) -> None:
    one, two, _ = hosts
    assert one.at(990)
    one.collectors.close()
    assert two.meta.get(KEYS.gc_full) is None


def test_a_collector_that_came_back_puts_its_sign_again(hosts: tuple[Host, Host, FakeClock]) -> None:
    one, _, clock = hosts
    assert one.at(990)
    clock.advance(TTL_S + 1)
    assert one.meta.get(KEYS.gc_full) is None
    one.collectors.beat()
    assert one.at(990)
