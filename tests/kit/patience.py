"""Time limits of tests for events that must happen. Such a limit is reached only if the event never happens.

No test asserts that something is quick: a busy machine would fail it. A test that a call does not wait for something
keeps that thing from happening until the call has returned; where the call must end by one of several deadlines, the
others are set far beyond ``PATIENCE_S``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_S = float(os.environ.get("KVSTORE_TEST_PATIENCE_S", "180"))
"""Less than pytest's own limit for a test, so that the test itself says what did not happen. The environment may ask
for less where many things are broken on purpose, and each would be waited for."""
NEVER_S = 3_600.0
"""A deadline of the code under test that must not be the one that ends a call."""
LOOK_S = 0.01
SLOWNESS_MAX = 10.0
RUNNERS_PER_CORE = 2
"""The tests themselves: four processes on two cores are an idle machine."""


def eventually(holds: Callable[[], object], what: str = "it", patience_s: float = PATIENCE_S) -> None:
    """Waits until it holds."""
    ends_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < ends_s, f"{what} did not happen within {patience_s:g} s"
        time.sleep(LOOK_S)


def is_stopped(pid: int) -> bool:
    """True if every thread of a process stands still after SIGSTOP."""
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(state == "T" for state in states)


def returns(call: Callable[[], T], what: str = "the call") -> T:
    """Returns the result of a call in a thread, or raises its error; fails if it does not return at all."""
    ended: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(call())
        except BaseException as error:  # noqa: BLE001 - carried to the test
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if failed:
        raise failed[0]
    assert ended, f"{what} did not return within {PATIENCE_S:g} s"
    return ended[0]


def slowness() -> float:
    """Returns how many times longer than on an idle machine things may take: the threads that want each core."""
    running = os.getloadavg()[0]
    try:
        running = max(running, float(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
    except OSError:
        pass  # not Linux
    return min(max(1.0, running / (os.cpu_count() or 1) / RUNNERS_PER_CORE), SLOWNESS_MAX)


def stretched(limits: T, *names: str) -> T:
    """The limits, with the named durations as much longer as this machine is slower now.

    For deadlines that end calls into what hangs, beside calls that must not be late.
    """
    factor = slowness()
    fields: dict[str, Any] = {name: getattr(limits, name) * factor for name in names}
    changed: T = replace(limits, **fields)  # type: ignore[type-var]
    return changed
