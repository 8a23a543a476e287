"""Ctrl-C as one line and exit code 130, at every moment of a program.

Apart from other signals because it is the first thing that a program imports, and so imports little itself.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
AGAIN_S = 0.05


class _EndsAtOnce:
    """A handler that ends this program with one line."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, number: int, frame: FrameType | None) -> None:
        os.write(2, f"{self._program}: interrupted\n".encode())
        os._exit(INTERRUPTED)


def ends_at_once(program: str) -> None:
    """From now on Ctrl-C ends this program with one line and exit code 130, except within ``raises``.

    For the time before a command begins and after it has ended: an exception in the middle of an import, or while the
    interpreter ends, is a traceback, or lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not of a program that is to ignore it
        signal.signal(signal.SIGINT, _EndsAtOnce(program))


@contextmanager
def raises() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt where ``ends_at_once`` was called."""
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if not isinstance(before, _EndsAtOnce):
        yield
        return

    def again(lost: sys.UnraisableHookArgs) -> None:
        # It came where Python cannot raise it, such as in a finalizer: it comes again, in a moment.
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(AGAIN_S, _thread.interrupt_main).start()
        else:
            hook(lost)

    try:
        sys.unraisablehook = again
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
