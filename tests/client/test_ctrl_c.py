"""Ctrl-C at every step that a caller's thread waits on: no lock stays locked, and the next call goes through."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

import kvstore
from kvstore.background import Loop
from kvstore.buffers import Borrowed
from kvstore.client.remote_move import MOVES_MAX, Slots
from kvstore.errors import Overloaded
from kvstore.waiting import Flag, Monitor
from tests.kit.patience import returns

pytestmark = pytest.mark.interrupts

WAIT_S = 60.0
IN_PYTHON = re.compile(r"threading\.(Condition|Event|Semaphore|BoundedSemaphore|Barrier)\(|queue\.Queue\(")
CALLERS = ("client", "connectors", "memory", "meta", "node", "wire")
STAND_ALONE = {"server.py"}
"""Runs etcd for a program of ours, which takes signals by itself."""


def interrupted_everywhere(work: Callable[[], object]) -> Iterator[int]:
    """Does ``work`` again and again, with Ctrl-C one step later each time, until it came behind the last one."""
    step, came = 0, True
    while came:
        left, came = step, False

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal left, came
            # Where Python looks for signals: as a function of ours begins, and after a call of C.
            if event not in ("call", "c_return") or came:
                return
            left -= 1
            if left < 0:
                came = True
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):  # nothing else: a caller hears of Ctrl-C and not of a lock
            sys.setprofile(profile)
            try:
                work()
            finally:
                sys.setprofile(None)
        yield step
        step += 1


def goes_through(work: Callable[[], object]) -> bool:
    """True if another thread gets through ``work``."""
    ended = threading.Event()

    def works() -> None:
        work()
        ended.set()

    threading.Thread(target=works, daemon=True).start()
    return ended.wait(WAIT_S)


def test_the_end_of_a_loop() -> None:
    """Its start is that of a thread, in which Python itself waits for an event of its own."""
    changed, steps = Monitor(), 0
    loops: list[Loop] = []

    def begin() -> None:
        loops.append(Loop("test-ctrl-c", changed, lambda: None))
        loops[-1].start()

    begin()
    for step in interrupted_everywhere(lambda: loops[-1].close(WAIT_S)):
        steps = step
        assert goes_through(begin), f"Ctrl-C at step {step}"
        assert loops[-2].close(WAIT_S), f"Ctrl-C at step {step}"
    assert steps > 1
    assert loops[-1].close(WAIT_S)


def test_a_place_for_a_move() -> None:
    slots, steps = Slots(), 0

    def taken() -> None:
        slots.take("next")
        slots.give("next")

    for step in interrupted_everywhere(lambda: slots.take("interrupted")):
        steps = step
        slots.give("interrupted")
        assert goes_through(taken), f"Ctrl-C at step {step}"
    assert steps > 1
    for number in range(MOVES_MAX):
        slots.take(number)
    with pytest.raises(Overloaded):
        slots.take("one more")


def entered(monitor: Monitor) -> None:
    with monitor:
        monitor.wait_for(lambda: False, 0.001)
        monitor.notify_all()


def test_a_monitor() -> None:
    monitor, steps = Monitor(), 0
    for step in interrupted_everywhere(lambda: entered(monitor)):
        steps = step
        assert goes_through(lambda: entered(monitor)), f"Ctrl-C at step {step}"
    assert steps > 5


def test_a_flag() -> None:
    flag = Flag()

    def used() -> None:
        flag.clear()
        flag.wait(0.001)
        flag.set()
        assert flag.wait()

    for step in interrupted_everywhere(used):
        assert goes_through(used), f"Ctrl-C at step {step}"


def test_memory_that_a_callers_own_thread_writes_into() -> None:
    """The caller's thread helps the lanes here: it takes its memory back itself, wherever its step was interrupted."""

    def writes() -> None:
        borrowed = Borrowed()
        try:
            with borrowed.writing():
                borrowed.check()
        finally:
            borrowed.withdraw()

    assert returns(lambda: max(interrupted_everywhere(writes)), "taking memory back") > 5


def test_a_monitor_wakes_up_who_waits() -> None:
    monitor, flag = Monitor(), Flag()
    seen: list[bool] = []

    def waits() -> None:
        with monitor:
            flag.set()
            seen.append(monitor.wait_for(lambda: bool(seen), WAIT_S))

    thread = threading.Thread(target=waits)
    thread.start()
    assert flag.wait(WAIT_S)
    with monitor:  # it waits, or it would have the lock
        seen.append(True)
        monitor.notify_all()
    thread.join(WAIT_S)
    assert seen == [True, True]


def test_nothing_that_callers_wait_on_is_entered_in_python() -> None:
    package = Path(kvstore.__file__).parent
    files = [package / "buffers.py", *(file for name in CALLERS for file in (package / name).rglob("*.py"))]
    found = [str(file) for file in files if IN_PYTHON.search(file.read_text()) and file.name not in STAND_ALONE]
    assert not found, "use kvstore.waiting there"
