"""SIGTERM, SIGINT and SIGHUP: the first one asks for an orderly end."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import TypeVar

from kvstore.cli.ctrl_c import INTERRUPTED

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], None]


class Interrupted(BaseException):
    """A signal asked to end. Not an Exception, so that no code on the way mistakes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = INTERRUPTED if number == signal.SIGINT else 2


SAME_WISH_S = 1.0
"""Signals this close together count as one: a service manager signals a whole group, and a parent its children too."""


class Stopper:
    """For servers: whether a signal came. A second one, a moment later, ends the program at once, after ``at_once``.

    Raises Interrupted at the end where the first one was Ctrl-C.
    """

    def __init__(self, at_once: Callable[[], object] = lambda: None) -> None:
        self._asked = False
        self._signal = 0
        self._asked_s = 0.0
        self._at_once = at_once

    @property
    def asked(self) -> bool:
        """True once this program was asked to end."""
        return self._asked

    def ask(self) -> None:
        """Does what the first signal does, for other callers that end this program. Idempotent."""
        self._asked = True
        with suppress(OSError):  # full of earlier bytes, or closed: nobody waits any more
            self._wake.send(b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until a signal comes; False where none came in time."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        asleep = select.poll()
        asleep.register(self._asleep, select.POLLIN)
        while not self._asked:
            left_ms = None if ends_s is None else 1000 * max(0.0, ends_s - time.monotonic())
            if not asleep.poll(left_ms):
                break
            with suppress(BlockingIOError):
                self._asleep.recv(4096)  # perhaps the signal of something else
        return self._asked

    def __enter__(self) -> Stopper:
        # Not an Event: a handler runs in the main thread, perhaps while that is inside Event.wait with the lock that
        # Event.set needs, and would wait for itself for ever.  A byte on a socket needs no lock.
        self._wake, self._asleep = socket.socketpair()
        self._wake.setblocking(False)
        self._asleep.setblocking(False)
        # A signal handled by another thread, as after SIGCONT, would not wake the main one, which runs the handler.
        self._waked_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._before = _install(self._came)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _restore(self._before)
        signal.set_wakeup_fd(self._waked_before)
        self._wake.close()
        self._asleep.close()
        if self._signal == signal.SIGINT and kind is None:
            raise Interrupted(signal.SIGINT)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal = number
            self._asked_s = time.monotonic()
            self.ask()
        elif time.monotonic() - self._asked_s > SAME_WISH_S:
            self._at_once()
            os._exit(INTERRUPTED if number == signal.SIGINT else 2)


class Interrupts:
    """For work that ends by itself: the first signal raises Interrupted in the main thread, later ones are ignored.

    Enter work that must be undone with ``guard``, so that no signal falls between doing and undoing.
    """

    def __init__(self) -> None:
        self._guarded = 0
        self._asked_by = 0
        self._raised = False

    def __enter__(self) -> Interrupts:
        self._before = _install(self._came)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)

    @contextmanager
    def guard(self, inner: AbstractContextManager[T]) -> Iterator[T]:
        """Enters and leaves ``inner`` undisturbed; a signal that comes meanwhile counts as soon as that is done."""
        self._guarded += 1
        try:
            value = inner.__enter__()
            try:
                self._guarded -= 1
                self._raise_if_asked()
                yield value
            finally:
                self._guarded += 1
                inner.__exit__(*sys.exc_info())
        finally:
            self._guarded -= 1
        self._raise_if_asked()

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._asked_by = self._asked_by or number
        if not self._guarded:
            self._raise_if_asked()

    def _raise_if_asked(self) -> None:
        if self._asked_by and not self._raised and not self._guarded:
            self._raised = True
            raise Interrupted(self._asked_by)


def _install(came: Handler) -> dict[int, object]:
    before: dict[int, object] = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # started with nohup: ignore a terminal that goes away
        before[number] = signal.signal(number, came)
    return before


def _restore(before: dict[int, object]) -> None:
    for number, was in before.items():
        signal.signal(number, was)  # type: ignore[arg-type]  # what signal.signal returned
