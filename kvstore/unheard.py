"""Starting programs undisturbed: no signal falls into it, and what is started never hears Ctrl-C.

A terminal sends Ctrl-C to all programs of a command. The one that started the others ends them, and says so once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unheard() -> Iterator[None]:
    """A program that is started within never hears Ctrl-C. This one hears, afterwards, each signal that came.

    Keep a record of the program within as well: a signal that came is raised as soon as this ends.
    """
    heard = list[int]()

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    # Blocking them is not enough: another thread may take a signal, and its handler runs in the main one.
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {each: signal.getsignal(each) for each in _ENDING}
    handlers = {each: was for each, was in handlers.items() if was not in (None, signal.SIG_IGN)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        for each in handlers:
            signal.signal(each, hear)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # programs that are started inherit it
        yield
    finally:
        for each, was in handlers.items():
            signal.signal(each, was)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number in heard:
            signal.raise_signal(number)


@contextmanager
def spawning() -> Iterator[None]:
    """``unheard``, for processes of ``multiprocessing``."""
    from multiprocessing import resource_tracker  # only where it is used

    resource_tracker.ensure_running()  # starting it unblocks SIGINT: within, the first process would hear it
    with unheard():
        yield
