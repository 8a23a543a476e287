"""Tasks in the background: what is refused, and that closing ends the threads whatever waits."""

from __future__ import annotations

import os
import threading
from functools import partial

from kvstore.core.executor import Tasks
from tests.kit.patience import PATIENCE_S


def test_too_many_tasks_are_refused_and_those_that_wait_are_done_before_it_closes() -> None:
    threads = Tasks("test-tasks", 1, 2)
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    assert threads.submit(first)
    assert begun.wait(PATIENCE_S)
    assert [threads.submit(partial(done.append, number)) for number in range(3)] == [True, True, False]
    assert not threads.close(0.05), "one is under way"
    assert not threads.submit(lambda: None)
    go_on.set()
    assert threads.close(30)
    assert done == [0, 1]


def test_a_task_that_raises_does_not_end_its_thread() -> None:
    threads = Tasks("test-tasks", 1, 8)
    done = threading.Event()
    assert threads.submit(lambda: 1 / 0)
    assert threads.submit(done.set)
    assert done.wait(PATIENCE_S)
    assert threads.close(30)


def test_a_forked_process_has_no_threads_and_is_told_so() -> None:
    threads = Tasks("test-tasks", 2, 8)
    child = os.fork()
    if not child:
        os._exit(not (not threads.submit(lambda: None) and threads.close(0)))
    assert os.waitpid(child, 0)[1] == 0
    assert threads.close(30)
