"""Tickets without a worker: the order of states, how many are kept, and that a running one ends when cancelled."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.errors import Overloaded, Unavailable
from kvstore.progress import Cancelled
from kvstore.sources import RandomIds, SystemClock
from kvstore.tickets import TRANSITIONS, State, Ticket
from kvstore.worker.control.book import Book
from kvstore.worker.control.runner import Runner, Step
from tests.kit.cases import for_each
from tests.kit.workers import WAIT_S, eventually


def ticket(id: str = "a", tenant: str | None = None) -> Ticket:
    return Ticket(id, "clear", "namespace m", "anyone", tenant, "shards", 1.0)


@contextmanager
def running(book: Book | None = None, threads_max: int = 4, spare_threads: int = 0) -> Iterator[Runner]:
    runner = Runner(book or Book(), SystemClock(), RandomIds(), threads_max=threads_max, spare_threads=spare_threads)
    try:
        yield runner
    finally:
        runner.close(WAIT_S)


def begin(runner: Runner, work: Callable[[Step], str], deadline_s: float = 0.0) -> str:
    return runner.begin("clear", work, about="", unit="shards", deadline_s=deadline_s).id


def ended(runner: Runner, ticket_id: str) -> Ticket:
    eventually(lambda: state(runner, ticket_id).ended, "the ticket has ended")
    found = runner.book.find(ticket_id)
    assert found is not None
    return found


def state(runner: Runner, ticket_id: str) -> State:
    found = runner.book.find(ticket_id)
    assert found is not None
    return found.state


# States


@for_each("before, after", [*itertools.product(State, State)])
def test_only_the_transitions_of_the_table_are_possible(before: State, after: State) -> None:
    now = ticket()
    if before is not State.WAITING:
        now = now.moved(State.RUNNING) if before is not State.CANCELLED else now
        now = now.moved(before) if before is not State.RUNNING else now
    assert now.state is before
    if after in TRANSITIONS[before]:
        assert now.moved(after).state is after
    else:
        with pytest.raises(AssertionError, match="never becomes"):
            now.moved(after)


def test_what_has_ended_stays_so_whoever_else_wants_to_end_it() -> None:
    book = Book()
    book.add(ticket())
    assert book.move("a", State.RUNNING)
    assert book.move("a", State.CANCELLED, message="first")
    assert not book.move("a", State.DONE, message="second")
    book.advance("a", 5, 5, {})
    found = book.find("a")
    assert found is not None and (found.state, found.message, found.done) == (State.CANCELLED, "first", 0)


# The book


def test_the_oldest_that_ended_is_forgotten_for_a_new_one_and_none_that_goes_on() -> None:
    book = Book(tickets_max=2)
    book.add(ticket("a"))
    book.add(ticket("b"))
    with pytest.raises(Overloaded, match="2 tickets are not done yet"):
        book.add(ticket("c"))
    book.move("b", State.CANCELLED)
    book.add(ticket("c"))
    assert [each.id for each in book.every()] == ["c", "a"]
    assert book.find("b") is None and not book.move("b", State.DONE)


def test_one_tenant_leaves_half_of_the_places_to_others() -> None:
    book = Book(tickets_max=4, tenant_tickets_max=2)
    book.add(ticket("a", "acme"))
    book.add(ticket("b", "acme"))
    with pytest.raises(Overloaded, match="2 tickets of tenant 'acme' are not done yet"):
        book.add(ticket("c", "acme"))
    book.add(ticket("d", "globex"))
    book.add(ticket("e"))
    book.move("a", State.CANCELLED)
    book.add(ticket("c", "acme"))
    assert [each.id for each in book.every()] == ["c", "e", "d", "b"]


def test_prompts_that_tickets_keep_are_bounded_and_one_tenant_leaves_half_to_others() -> None:
    """They are memory that no other limit counts: a hundred of the largest would be 1.6 GiB."""

    def moving(id: str, tenant: str, tokens: int) -> Ticket:
        return replace(ticket(id, tenant), tokens=tokens)

    apart = Book(tickets_max=10, tenant_tickets_max=5, tokens_max=100)
    apart.add(moving("a", "acme", 40))
    with pytest.raises(Overloaded, match="40 tokens, and the limit is 50"):
        apart.add(moving("b", "acme", 11))
    apart.add(moving("b", "globex", 50))
    with pytest.raises(Overloaded, match="90 tokens, and the limit is 100"):
        apart.add(moving("c", "initech", 11))
    apart.add(ticket("clear", "acme"))
    apart.move("a", State.CANCELLED)
    apart.add(moving("c", "initech", 11))
    alike = Book(tokens_max=100)
    alike.add(moving("a", "acme", 100))
    with pytest.raises(Overloaded, match="100 tokens, and the limit is 100"):
        alike.add(moving("b", "globex", 1))


def test_a_watch_wakes_at_each_change_and_when_the_ticket_is_forgotten() -> None:
    book = Book(tickets_max=1)
    book.add(ticket("a"))
    seen = book.find("a")
    assert seen is not None
    assert book.wait(seen, 0.01) is seen
    book.move("a", State.RUNNING)
    now = book.wait(seen, WAIT_S)
    assert now is not None and now.state is State.RUNNING
    book.move("a", State.DONE)
    book.add(ticket("b"))
    assert book.wait(now, WAIT_S) is None


# The runner


def test_progress_and_what_came_of_it_are_told() -> None:
    def work(step: Step) -> str:
        step.progress(1, 4)
        step.count(chunks=7)
        step.progress(4, 4)
        return "said"

    with running() as runner:
        found = ended(runner, begin(runner, work))
    assert (found.state, found.done, found.total) == (State.DONE, 4, 4)
    assert (found.message, dict(found.counts)) == ("said", {"chunks": 7})
    assert found.ended_s >= found.began_s


def test_one_that_runs_ends_at_its_next_step_when_cancelled() -> None:
    began = threading.Event()

    def work(step: Step) -> str:
        began.set()
        while True:
            step.pause(0.01)

    with running() as runner:
        ticket_id = begin(runner, work)
        assert began.wait(WAIT_S)
        runner.cancel(ticket_id)
        assert ended(runner, ticket_id).state is State.CANCELLED


def test_one_that_waits_is_cancelled_at_once_and_never_begun() -> None:
    go_on = threading.Event()
    done: list[str] = []

    def first(step: Step) -> str:
        go_on.wait(WAIT_S)
        return ""

    def second(step: Step) -> str:
        done.append("second")
        return ""

    with running(threads_max=1) as runner:
        running_id, waiting_id = begin(runner, first), begin(runner, second)
        runner.cancel(waiting_id)
        assert state(runner, waiting_id) is State.CANCELLED
        go_on.set()
        assert ended(runner, running_id).state is State.DONE
        assert ended(runner, begin(runner, lambda step: "third")).message == "third"
    assert not done


def test_what_is_not_done_by_its_deadline_fails() -> None:
    def work(step: Step) -> str:
        while True:
            step.pause(0.01)

    with running() as runner:
        found = ended(runner, begin(runner, work, deadline_s=0.05))
    assert found.state is State.FAILED and "the deadline passed" in found.message


@for_each(
    "error, expected, said",
    [
        (Unavailable("etcd is away"), State.FAILED, "etcd is away"),
        (Cancelled("enough"), State.CANCELLED, "enough"),
        (RuntimeError("secret path"), State.FAILED, "look for ticket"),
    ],
)
def test_what_the_work_raises_ends_the_ticket_and_not_the_thread(error: Exception, expected: State, said: str) -> None:
    def work(step: Step) -> str:
        raise error

    with running(threads_max=1) as runner:
        found = ended(runner, begin(runner, work))
        assert ended(runner, begin(runner, lambda step: "")).state is State.DONE
    assert found.state is expected and said in found.message and "secret" not in found.message


def test_no_more_than_so_many_at_once() -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def work(step: Step) -> str:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        step.pause(0.02)
        with lock:
            inside -= 1
        return ""

    with running(threads_max=2) as runner:
        ids = [begin(runner, work) for _ in range(6)]
        assert all(ended(runner, each).state is State.DONE for each in ids)
    assert most == 2


def test_who_asks_for_many_does_not_make_others_wait_for_them() -> None:
    done: list[str] = []
    go = threading.Event()

    def first(step: Step) -> str:
        go.wait(WAIT_S)
        return ""

    def begun(tenant: str, number: int) -> str:
        def work(step: Step) -> str:
            done.append(f"{tenant}{number}")
            step.pause(0.3)
            return ""

        return runner.begin("move", work, about="", unit="chunks", tenant=tenant).id

    with running(threads_max=2) as runner:
        for _ in range(2):
            runner.begin("move", first, about="", unit="chunks", tenant=None)
        ids = [begun("acme", number) for number in range(4)] + [begun("globex", 0)]
        go.set()
        assert all(ended(runner, each).state is State.DONE for each in ids)
    assert done.index("globex0") < 2


def test_close_cancels_all_and_begins_nothing_any_more() -> None:
    def work(step: Step) -> str:
        while True:
            step.pause(0.01)

    runner = Runner(Book(), SystemClock(), RandomIds(), threads_max=1)
    ids = [begin(runner, work), begin(runner, work)]
    runner.close(WAIT_S)
    assert [ended(runner, each).state for each in ids] == [State.CANCELLED, State.CANCELLED]
    with pytest.raises(Unavailable, match="draining"):
        begin(runner, work)
    assert not [each for each in threading.enumerate() if each.name == "kvstore-ticket"]


def test_acts_about_single_tenants_leave_a_thread_to_those_about_all() -> None:
    """Clearing a bad roll-out is such an operation, while tenants prefetch all their prompts."""
    release = threading.Event()

    def long(step: Step) -> str:
        assert release.wait(WAIT_S)
        return ""

    with running(threads_max=2, spare_threads=1) as runner:
        try:
            theirs = [
                runner.begin("prefetch", long, about="", unit="", tenant=tenant).id for tenant in ("a", "b", "c", "")
            ]
            eventually(lambda: runner.book.count(State.RUNNING) == 2, "as many as tenants may have")
            assert ended(runner, begin(runner, lambda step: "")).state is State.DONE
            assert runner.book.count(State.WAITING) == 2
        finally:
            release.set()
        assert {ended(runner, each).state for each in theirs} == {State.DONE}


def test_tenants_that_somebody_made_up_are_not_kept() -> None:
    with running() as runner:
        for number in range(5):
            ended(runner, runner.begin("clear", lambda step: "", about="", unit="", tenant=f"nobody-{number}").id)
        eventually(lambda: not runner._running, "no tenant has anything under way")
