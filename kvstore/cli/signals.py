"""SIGTERM, SIGINT and SIGHUP: the first one requests an orderly end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C, as in shells."""
SAME_REQUEST_S = 1.0
"""Signals this close together count as one: a service manager signals a whole group, and a parent its children too."""
POLL_S = 0.1
"""How late a server notices a signal. It polls: an Event that a handler sets may be locked by the main thread."""

Handler = Callable[[int, FrameType | None], None]


class Stopper:
    """For servers: whether a signal came. A second one, a moment later, calls ``at_once`` and ends the program.

    Raises KeyboardInterrupt at the end if the first one was Ctrl-C.
    """

    def __init__(self, at_once: Callable[[], object] = lambda: None) -> None:
        self.asked = False
        """True once this program was asked to end."""
        self._signal = 0
        self._asked_s = 0.0
        self._at_once = at_once

    def ask(self) -> None:
        """Does what the first signal does, for other callers that end this program. Idempotent."""
        self.asked = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until a signal comes; False where none came in time."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.asked:
            left_s = POLL_S if ends_s is None else min(POLL_S, ends_s - time.monotonic())
            if left_s <= 0:
                break
            time.sleep(left_s)
        return self.asked

    def __enter__(self) -> Stopper:
        self._before = _install(self._came)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _restore(self._before)
        if self._signal == signal.SIGINT and kind is None:
            raise KeyboardInterrupt

    def _came(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal = number
            self._asked_s = time.monotonic()
            self.ask()
        elif time.monotonic() - self._asked_s > SAME_REQUEST_S:
            self._at_once()
            os._exit(128 + number)


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Raises SystemExit on the first SIGTERM or SIGHUP, so that work which ends by itself is cleaned up."""

    def exit_once(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # a second one would cut the cleanup
        sys.exit(128 + number)

    before = _install(exit_once, (signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def aborts() -> Iterator[None]:
    """Ends the program after Ctrl-C as click does, with the exit code of shells."""
    try:
        yield
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _install(
    handler: Handler, numbers: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
) -> dict[int, object]:
    before: dict[int, object] = {}
    for number in numbers:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # started with nohup: ignore a terminal that is closed
        before[number] = signal.signal(number, handler)
    return before


def _restore(before: dict[int, object]) -> None:
    for number, was in before.items():
        signal.signal(number, was)  # type: ignore[arg-type]  # what signal.signal returned
