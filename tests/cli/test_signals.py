"""Signals during work that must be undone: whenever they come, everything entered is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.cli.signals import Interrupted, Interrupts, Stopper


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # to this, the main, thread: it is handled before kill returns


@contextmanager
def recorded(log: list[str], *, while_entering: bool = False, while_leaving: bool = False) -> Iterator[None]:
    if while_entering:
        interrupt()
    log.append("entered")
    try:
        yield
    finally:
        if while_leaving:
            interrupt()
        log.append("left")


def test_a_signal_in_the_work_raises_and_leaves() -> None:
    log: list[str] = []
    with pytest.raises(Interrupted, match="SIGTERM"):
        with Interrupts() as interrupts, interrupts.guard(recorded(log)):
            interrupt()
            log.append("went on")
    assert log == ["entered", "left"]


def test_a_signal_while_entering_counts_once_that_is_done() -> None:
    log: list[str] = []
    with pytest.raises(Interrupted):
        with Interrupts() as interrupts, interrupts.guard(recorded(log, while_entering=True)):
            log.append("went on")
    assert log == ["entered", "left"]


def test_a_signal_while_leaving_does_not_cut_it() -> None:
    log: list[str] = []
    with pytest.raises(Interrupted):
        with Interrupts() as interrupts, interrupts.guard(recorded(log, while_leaving=True)):
            log.append("worked")
    assert log == ["entered", "worked", "left"]


def test_later_signals_do_not_cut_what_the_first_one_began() -> None:
    log: list[str] = []
    with pytest.raises(Interrupted):
        with Interrupts() as interrupts, interrupts.guard(recorded(log, while_leaving=True)):
            try:
                interrupt()
            finally:
                interrupt()
                log.append("cleaned")
    assert log == ["entered", "cleaned", "left"]


def test_a_failure_inside_is_not_hidden() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        with Interrupts() as interrupts, interrupts.guard(recorded(log)):
            raise ZeroDivisionError
    assert log == ["entered", "left"]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_is_asked_once() -> None:
    with Stopper() as stopper:
        assert not stopper.wait(0.0)
        interrupt()
        assert stopper.asked and stopper.wait(0.0)


def test_a_server_that_was_asked_by_its_own_is_not_ended_at_once_by_the_first_signal() -> None:
    at_once: list[str] = []
    with Stopper(at_once=lambda: at_once.append("ended")) as stopper:
        stopper.ask()
        assert stopper.wait(0.0)
        interrupt()
        assert stopper.asked and not at_once


def test_a_signal_in_the_middle_of_a_wait_never_waits_for_itself() -> None:
    script = """
import faulthandler, signal
from kvstore.cli.signals import Stopper
faulthandler.dump_traceback_later(60, exit=True)
for number in range(1000):
    with Stopper() as stopper:
        signal.signal(signal.SIGALRM, lambda *_: stopper.ask())
        signal.setitimer(signal.ITIMER_REAL, (1 + number % 97) / 1e6)
        while not stopper.wait(0.00001):
            pass
"""
    # In a program of its own: the timer is what ends tests that take too long.
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_signal_that_another_thread_is_given_wakes_the_server() -> None:
    """After SIGCONT, for one: the handler runs in the main thread, which would otherwise sleep on."""
    script = """
import os, signal, threading, time
from kvstore.cli.signals import Stopper
def signalled():
    for number in (signal.SIGUSR1, signal.SIGTERM):
        time.sleep(0.2)
        os.kill(os.getpid(), number)
    time.sleep(60)
signal.signal(signal.SIGUSR1, lambda *_: None)
with Stopper() as stopper:
    threading.Thread(target=signalled, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGTERM))
    began_s = time.monotonic()
    assert stopper.wait(50) and 0.3 < time.monotonic() - began_s < 40
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper() as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopper.asked
    finally:
        signal.signal(signal.SIGHUP, before)
