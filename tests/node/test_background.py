"""Work in threads: a loop in the background, and work that its caller shares until a deadline."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.client import remote
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline, DeadlinePassed, Decision, Executor, Loop
from tests.kit.patience import NEVER_S, PATIENCE_S, returns


class Queue:
    """The smallest owner of a loop: what is added is done in turn."""

    def __init__(self, **options: Any) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Callable[[], object]] = deque()
        self.pause_s: float | None = None
        self.loop = Loop("test-background", self.changed, self._decide, **options)

    def add(self, *works: Callable[[], object]) -> None:
        with self.changed:
            self.waiting += works
            self.changed.notify_all()

    def _decide(self) -> Decision:
        return self.waiting.popleft() if self.waiting else self.pause_s


class Step:
    """Work that begins, and then waits until it may go on."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        self.ended.set()


def test_what_is_decided_is_done_in_turn_without_the_lock() -> None:
    queue, done, end = Queue(), list[int](), threading.Event()

    def note(number: int) -> None:
        returns(queue.add, "taking the lock while it works")
        done.append(number)

    queue.add(*(lambda number=number: note(number) for number in range(3)), end.set)
    assert not done, "nothing happens before the start"
    queue.loop.start()
    assert end.wait(PATIENCE_S)
    assert done == [0, 1, 2]
    assert queue.loop.close(PATIENCE_S)


@pytest.mark.parametrize("drains", [False, True])
def test_close_ends_the_work_under_way_and_only_a_loop_that_drains_does_the_rest(drains: bool) -> None:
    queue, first, second = Queue(drains=drains), Step(), Step()
    second.may_end.set()
    queue.loop.start()
    queue.add(first, second)
    assert first.begun.wait(PATIENCE_S)
    assert not queue.loop.close(0.0), "one is under way"
    assert queue.loop.closed
    first.may_end.set()
    assert queue.loop.close(PATIENCE_S)
    assert second.ended.is_set() == drains
    queue.loop.start()
    assert len(queue.loop.threads) == 1, "nothing starts after the end"


def test_work_that_raises_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A second failure in a row pauses, and closing does not wait for the pause."""
    queue, done, failed = Queue(pause_s=NEVER_S), threading.Event(), threading.Event()

    def fail() -> None:
        failed.set()
        raise ZeroDivisionError

    queue.loop.start()
    queue.add(lambda: 1 // 0, done.set)
    assert done.wait(PATIENCE_S)
    assert "background.failed thread=test-background" in caplog.text and "ZeroDivisionError" in caplog.text
    done.clear()
    queue.add(lambda: 1 // 0, fail, done.set)
    assert failed.wait(PATIENCE_S)
    assert queue.loop.close(PATIENCE_S) and not done.is_set()


def test_a_forked_child_has_no_threads_and_never_waits_for_the_lock() -> None:
    queue = Queue()
    queue.loop.start()
    with queue.changed:  # the child's copy of the lock stays locked, whoever held it
        child = os.fork()
        if not child:
            starting = threading.Thread(target=queue.loop.start, daemon=True)
            starting.start()
            starting.join(PATIENCE_S)
            os._exit(not (not starting.is_alive() and not queue.loop.owner.is_here and queue.loop.close(NEVER_S)))
    assert os.waitpid(child, 0)[1] == 0
    assert queue.loop.close(PATIENCE_S)


def test_shared_work_begins_nothing_after_the_deadline() -> None:
    """It raises what the work raises."""
    clock = SystemClock()
    executor = Executor(1, 1, 8, 5, clock)
    done: list[int] = []

    def work(number: int) -> bool:
        done.append(number)
        if number == 2:
            raise ValueError("its own")
        return True

    try:
        with pytest.raises(DeadlinePassed):
            executor.share(9, work, Deadline(clock, 0))
        assert not done
        with pytest.raises(ValueError, match="its own"):
            executor.share(9, work, Deadline(clock, 30))
        assert done == [0, 1, 2]
    finally:
        executor.close()


def test_source_of_a_copy_lives_as_long_as_the_copy() -> None:
    """A late thread's memory stays valid even after the arena was closed."""
    clock, alive = SystemClock(), np.zeros(8, np.uint8)
    kept = weakref.ref(alive)
    executor = Executor(1, 2, 8, 5, clock)
    at = np.array([alive.ctypes.data], np.uint64)
    try:
        batch = executor.start(1, partial(remote._copy_step, alive, at, at, [(0, 8)]), helped=True)
        del alive
        assert kept() is not None
        batch.help(Deadline(clock, 30))
        batch.wait(Deadline(clock, 30))
        assert kept() is None
    finally:
        executor.close()
