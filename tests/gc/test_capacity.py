"""The level of a root between surveys, when it makes a round urgent, and the sign for nodes."""

from __future__ import annotations

import logging

import pytest

from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.memory_store import MemoryStore
from kvstore.meta.usage import Room, Usage
from kvstore.root.interface import Space
from kvstore_gc.capacity import Level, Watermarks
from kvstore_gc.membership import TTL_S, Collectors
from kvstore_gc.signs import FULL_AGAIN_S, PACE_S_MIN, REPORTS_PER_S, FullSign, room_of
from tests.kit.cases import for_each
from tests.kit.clusters import site_of
from tests.kit.fake_meta import CountingIds, FakeClock

KEYS = Keys(bytes(16))


ONE, TWO = SessionId(b"1" * 16), SessionId(b"2" * 16)


def space(free: int | None) -> Space:
    return Space(1000, free)


class Marks(Watermarks):
    """Watermarks with their own clock, and a survey in one step."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.clock = FakeClock()
        super().__init__(max_bytes, 0.9, self.clock)

    def survey(self, used: int, free: int | None = None) -> None:
        self.followed(space(free))
        self.surveyed(used, self.mark())
        self.clock.advance(self.late_s + 1)

    def says(self, reporter: SessionId, written: int, removed: int = 0, pending: int = 0) -> None:
        self.reported(reporter, Usage(written, removed, pending), is_answer=True)


def test_used_bytes_are_followed_by_what_is_reported() -> None:
    marks = Marks(1000)
    assert marks.level is None
    marks.survey(300)
    assert marks.level == Level(300, 1000)
    marks.says(ONE, 200)
    marks.says(TWO, 100, 50)
    marks.says(ONE, 250)
    assert marks.level == Level(600, 1000)
    marks.reaped(150)
    assert marks.level == Level(450, 1000)


def test_what_others_delete_hides_no_growth() -> None:
    marks = Marks(1000)
    marks.survey(300, free=5000)
    marks.followed(space(9000))
    marks.says(ONE, 680)
    assert marks.level == Level(980, 1000) and marks.is_urgent


def test_what_others_write_is_no_growth_of_ours_and_a_lack_of_room_only_where_there_is_one() -> None:
    marks = Marks(1000)
    marks.survey(300, free=5000)
    marks.followed(space(2000))
    assert marks.level == Level(300, 1000)
    marks.followed(space(100))
    assert marks.level == Level(300, 400)


def test_free_space_that_nobody_reported_to_have_taken_asks_for_a_survey() -> None:
    marks = Marks(1000)
    marks.survey(300, free=5000)
    marks.settled()
    marks.followed(space(4500))
    assert not marks.is_urgent, "800 at most"
    marks.followed(space(4300))
    assert marks.is_urgent, "a node without a session may have written it"
    marks.survey(300, free=4300)
    marks.settled()
    assert not marks.is_urgent, "it was somebody else's"


def test_what_others_have_filled_is_no_room_of_ours() -> None:
    marks = Marks()
    marks.survey(300, free=100)  # 600 are somebody else's
    assert marks.level == Level(300, 400)


@for_each("max_bytes, free, capacity", [(500, 700, 500), (500, 100, 400), (500, None, 500)])
def test_a_limit_counts_as_far_as_there_is_room(max_bytes: int, free: int | None, capacity: int) -> None:
    marks = Marks(max_bytes)
    marks.survey(300, free)
    assert marks.level == Level(300, capacity)


def test_without_room_and_limit_nothing_is_known() -> None:
    marks = Marks()
    marks.survey(300)
    assert marks.level is None and not marks.is_urgent and not marks.is_known


def test_what_a_reporter_wrote_stays_when_its_key_is_gone() -> None:
    marks = Marks(1000)
    marks.survey(300)
    marks.says(ONE, 200)
    marks.gone(ONE)
    assert marks.level == Level(500, 1000)
    marks.survey(500)
    assert marks.level == Level(500, 1000), "the survey has seen it"


def test_puts_under_way_count_until_they_end() -> None:
    marks = Marks(1000)
    marks.says(ONE, 0, pending=100)
    marks.survey(300)
    assert marks.level == Level(400, 1000), "the listing may lack all of it"
    marks.says(ONE, 60, pending=100)
    assert marks.level == Level(460, 1000)
    marks.says(ONE, 80)
    assert marks.level == Level(380, 1000)


def test_puts_under_way_need_room_on_the_disk() -> None:
    marks = Marks()
    marks.survey(300, free=700)
    marks.says(ONE, 0, pending=100)
    assert marks.level == Level(400, 1000)


def test_puts_under_way_of_one_that_is_gone_count_until_a_listing_after_its_end() -> None:
    marks = Marks(1000)
    marks.survey(300)
    marks.says(ONE, 0, pending=100)
    mark = marks.mark()
    marks.gone(ONE)
    marks.surveyed(300, mark)
    assert marks.level == Level(400, 1000), "it may have written behind the listing"
    marks.survey(350)
    assert marks.level == Level(350, 1000)


def test_puts_that_wait_for_room_make_a_round_urgent() -> None:
    marks = Marks(1000)
    marks.survey(880)
    marks.settled()
    assert not marks.is_urgent
    marks.says(ONE, 0, pending=80)
    assert marks.is_urgent, "they may not begin over the stop mark"


def test_what_is_written_while_a_survey_lists_counts_twice_and_is_never_lost() -> None:
    marks = Marks(1000)
    marks.survey(0)
    marks.says(ONE, 100)
    mark = marks.mark()
    marks.says(ONE, 150)  # listed or not, nobody knows
    marks.gone(ONE)
    marks.surveyed(100, mark)
    assert marks.level == Level(150, 1000)


def test_what_is_deleted_while_a_survey_lists_is_not_subtracted_from_it() -> None:
    marks = Marks(1000)
    marks.survey(950)
    mark = marks.mark()
    marks.reaped(100)
    marks.says(ONE, 0, 100)
    marks.surveyed(950, mark)  # it may or may not have listed the chunks that were deleted afterwards
    assert marks.level == Level(950, 1000)
    marks.settled()
    marks.says(ONE, 0, 150)
    assert marks.level == Level(950, 1000), "deleted before the listing ended, perhaps, and reported late"
    assert marks.is_urgent, "another survey tells"
    marks.clock.advance(marks.late_s)
    marks.says(ONE, 0, 160)
    marks.reaped(1)
    assert marks.level == Level(939, 1000)


def test_reports_of_before_the_first_survey_are_in_it() -> None:
    marks = Marks(1000)
    marks.says(ONE, 700)
    marks.survey(800)
    assert marks.level == Level(800, 1000)
    marks.says(ONE, 750)
    assert marks.level == Level(850, 1000)


def test_a_report_that_arrives_late_changes_nothing() -> None:
    marks = Marks(1000)
    marks.survey(0)
    marks.says(ONE, 700, 20)
    marks.says(ONE, 600, 10)
    assert marks.level == Level(680, 1000)


def test_a_node_that_was_silent_before_the_survey_counts_from_its_first_answer() -> None:
    """Otherwise a starting collector takes the node's writes of days without one for growth."""
    for answers_after in (False, True):
        marks = Marks(1000)
        marks.reported(ONE, Usage(10), is_answer=False)
        mark = marks.mark(frozenset({ONE, TWO}))
        if answers_after:
            marks.surveyed(300, mark)
        marks.says(ONE, 5000)
        if not answers_after:
            marks.surveyed(300, mark)
        assert marks.level == Level(300, 1000)
        marks.says(ONE, 5100)
        assert marks.level == Level(400, 1000)


def test_the_smallest_limit_of_the_collectors_holds_and_makes_a_round_urgent() -> None:
    marks = Marks(1000)
    marks.survey(500)
    marks.settled()
    marks.limited(2000)
    assert marks.level == Level(500, 1000) and not marks.is_urgent
    marks.limited(520)
    assert marks.level == Level(500, 520) and marks.is_urgent
    marks.limited(None)
    assert marks.level == Level(500, 1000)


def test_s8_a_level_that_was_forgotten_is_unknown_until_a_survey_that_began_later() -> None:
    marks = Marks(1000)
    marks.survey(300)
    early = marks.mark()
    assert not marks.is_urgent
    marks.forget()
    marks.surveyed(300, early)
    assert marks.level is None and not marks.is_surveyed and marks.is_urgent, "that one may lack what was written"
    marks.survey(700)
    assert marks.level == Level(700, 1000) and not marks.is_urgent


def test_a_round_is_urgent_once_over_the_high_watermark_and_again_only_after_growth() -> None:
    marks = Marks(1000)
    marks.survey(850)
    marks.settled()
    assert not marks.is_urgent
    marks.says(ONE, 70)
    assert marks.is_urgent
    marks.survey(920)
    marks.settled()  # nothing could be deleted
    assert not marks.is_urgent
    marks.says(ONE, 75)
    assert not marks.is_urgent, "grown by half a per cent"
    marks.says(ONE, 80)
    assert marks.is_urgent


def test_what_was_written_while_a_round_listed_makes_the_next_one_urgent() -> None:
    marks = Marks(1000)
    mark = marks.mark()
    marks.says(ONE, 80)
    marks.surveyed(890, mark)  # below the high watermark: this round deletes nothing
    marks.settled()
    assert marks.level == Level(970, 1000), "nodes write nothing more"
    assert marks.is_urgent, "else they would be refused for a whole interval"
    marks.survey(950)
    assert marks.is_urgent, "this round is to hurry"
    marks.settled()
    assert not marks.is_urgent, "it saw all that was written"


def test_what_is_written_where_something_was_deleted_makes_a_round_urgent() -> None:
    marks = Marks(1000)
    marks.survey(948)
    marks.settled()  # nothing could be deleted
    marks.says(ONE, 0, 40)
    marks.says(ONE, 40, 40)
    assert marks.level == Level(948, 1000) and marks.is_urgent


# What nodes are asked


def test_nodes_may_write_together_what_lies_between_the_stop_mark_and_the_capacity() -> None:
    marks = Marks(100_000)
    assert room_of(marks, 4, 7) == Room(7, None, None, PACE_S_MIN)
    marks.survey(94_000)
    room = room_of(marks, 4, 8)
    assert (room.revision, room.allowance_bytes) == (8, 5_000 // 5), "one more share, for a node that joins"
    assert room.step_bytes is not None and room.allowance_bytes is not None
    assert 3 * room.step_bytes <= room.allowance_bytes, "a report is counted before the node must wait for it"
    marks.says(ONE, 1_100)
    assert room_of(marks, 4, 9).allowance_bytes == 0


def test_a_thousand_nodes_report_a_hundred_times_a_second_at_most() -> None:
    marks = Marks(1 << 40)
    marks.survey(0)
    assert room_of(marks, 10, 1).pace_s == PACE_S_MIN
    assert all(count / room_of(marks, count, 1).pace_s <= REPORTS_PER_S for count in (1, 25, 100, 1000, 5000))


class Host:
    """One collector with its sign."""

    def __init__(self, store: MemoryStore, clock: FakeClock, ids: CountingIds) -> None:
        self.meta = MemoryMeta(store)
        site = site_of(self.meta, clock=clock, ids=ids)
        self.collectors = Collectors(site)
        self.collectors.beat()
        self.sign = FullSign(site, self.collectors)
        self.marks = Watermarks(1000, 0.9)

    def at(self, used: int) -> bool:
        """True if the sign is there when this much is used."""
        self.marks.surveyed(used, self.marks.mark())
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


def test_what_is_asked_for_shows_no_sign(hosts: tuple[Host, Host, FakeClock]) -> None:
    """A put that cannot fit would keep all others away."""
    one = hosts[0]
    one.marks.reported(ONE, Usage(0, 0, 0, 500), is_answer=True)
    assert not one.at(700) and one.marks.is_urgent
    one.marks.reported(ONE, Usage(0, 0, 300, 0), is_answer=True)
    assert one.at(700)


def test_a_sign_that_no_lease_ends_is_taken_away(hosts: tuple[Host, Host, FakeClock]) -> None:
    one, two, _ = hosts
    one.meta.put(KEYS.gc_full, b"nonsense")
    assert not one.at(100), "an empty root refuses no puts"
    one.meta.put(KEYS.gc_full, b"nonsense")
    one.at(990)
    assert one.at(990) and one.sign.is_shown, "its own comes instead"
    assert two.at(100), "another collector's stays"


def test_the_sign_comes_again_at_once_when_the_root_fills_again_at_once(hosts: tuple[Host, Host, FakeClock]) -> None:
    one = hosts[0]
    assert [one.at(used) for used in (990, 100, 990, 100, 990)] == [True, False, True, False, True]


def test_the_log_says_once_in_a_minute_that_the_root_is_full(
    hosts: tuple[Host, Host, FakeClock], caplog: pytest.LogCaptureFixture
) -> None:
    one, _, clock = hosts

    def said(used: list[int]) -> list[str]:
        caplog.clear()
        for each in used:
            one.at(each)
        return [line.getMessage().split()[0] for line in caplog.records if line.levelno == logging.WARNING]

    assert said([990, 100, 990, 100, 990]) == ["gc.full", "gc.full_over"]
    for _ in range(8):
        clock.advance(TTL_S)
        one.collectors.beat()
    assert said([990, 100, 990, 100]) == ["gc.full", "gc.full_over"]


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
    clock.advance(FULL_AGAIN_S)
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
