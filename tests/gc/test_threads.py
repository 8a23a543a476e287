"""Threads for calls to the root, which may never return."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import RootMismatch, Unavailable
from kvstore_gc.threads import Stop, Stopped, Threads, within
from tests.kit.patience import PATIENCE_S


def test_nobody_waits_for_a_hanging_call_once_the_end_is_asked_for() -> None:
    stop, release, reached = Stop(), threading.Event(), threading.Event()

    def hang(number: int) -> None:
        reached.set()
        release.wait()

    def ask() -> None:
        reached.wait(PATIENCE_S)
        stop.ask()

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(Stopped):
        Threads(2, stop).each(2, hang)
    release.set()
    asking.join(PATIENCE_S)


def test_a_call_that_does_not_return_in_time_is_unavailable() -> None:
    release = threading.Event()
    with pytest.raises(Unavailable, match="the root did not answer"):
        within(0.05, "the root", release.wait)
    release.set()
    assert within(10, "the root", lambda: 7) == 7
    with pytest.raises(RootMismatch):
        within(10, "the root", _mismatch)


def _mismatch() -> None:
    raise RootMismatch("another")
