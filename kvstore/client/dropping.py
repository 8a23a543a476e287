"""Stores that nobody closed, and holds that nobody released: if dropped, they warn, and still end.

What a store put behind is written to the root before the interpreter ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakSet, finalize

from kvstore.client.port import Port, Protecting
from kvstore.node.write_behind import WriteBehind


class Place(NamedTuple):
    """A line of the program that uses this package."""

    file: str
    line: int


_open: WeakSet[WriteBehind] = WeakSet()
"""The queues of chunks put behind, one of each open store of this process."""
_process = 0

_opened_at: ContextVar[Place | None] = ContextVar("_opened_at", default=None)


def caller() -> Place:
    """Returns the innermost line of this thread's calls that is not of this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kvstore":
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def opened_at(place: Place) -> Iterator[None]:
    """Says where the program opens what this thread opens within: another thread may have been asked to."""
    token = _opened_at.set(place)
    try:
        yield
    finally:
        _opened_at.reset(token)


def close_when_dropped(port: Port, close: Callable[[], None], name: str) -> finalize[..., Port]:
    """Calls ``close``, with a ResourceWarning, once nothing refers to ``port``. Detach the finalizer before closing.

    The warning is about the line of the program that opened the store.

    ``close`` must not refer to the port, or the port would never be collected. Nothing happens when the interpreter
    ends: the threads are daemons, and the system closes the rest.
    """
    finalizer = finalize(port, _close_dropped, close, name, _opened_at.get() or caller(), os.getpid())
    finalizer.atexit = False
    return finalizer


def release_dropped(hold: object, held: Protecting) -> None:
    """Releases what a hold rests on that nobody released: call it from ``__del__``.

    There is a ResourceWarning, unless the hold is over or empty. It is about the line that dropped the hold; with
    tracemalloc it has the line that took it, as Python's own for files.
    """
    if sys.is_finalizing():
        return
    is_alive = held.protects
    _end_apart(held.release)
    if is_alive:  # last: this raises if warnings are errors
        warnings.warn(
            "kvstore: a hold was dropped without release(); it is being released now. Call release(), or use the hold "
            "as a context (with ... as hold:)",
            ResourceWarning,
            stacklevel=3,
            source=hold,
        )


def _close_dropped(close: Callable[[], None], name: str, place: Place, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: threads and connections belong to its parent
    _end_apart(close)
    # Last: this raises if warnings are errors.
    warnings.warn_explicit(
        f"kvstore: the store of {name}, opened here, was dropped without close(); it is being closed now. Call "
        "close(), or use the store as a context (with ... as store:)",
        ResourceWarning,
        place.file,
        place.line,
    )


def _end_apart(end: Callable[[], None]) -> None:
    """Calls ``end`` in another thread: the garbage collector drops things in any thread at any point, perhaps while it
    has a lock that ending needs. So this takes no lock of ours.
    """
    with suppress(RuntimeError):  # no thread can start: the interpreter ends, or the system has no room
        threading.Thread(target=end, name="kvstore-closing", daemon=True).start()


def flush_at_exit(behind: WriteBehind) -> None:
    """Writes what waits there before the interpreter ends, also where a store was dropped just then.

    So it is lost only where a process is killed, not where a script ends without ``close()``.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _open.clear()
        # A child that multiprocessing forked ends without calling what atexit has.
        if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
            multiprocessing.Finalize(None, _flush_all, exitpriority=0)
    _open.add(behind)


def _flush_all() -> None:
    if _process != os.getpid():
        return
    failed: BaseException | None = None
    began_s = time.monotonic()
    for behind in list(_open):
        # All of them write meanwhile, so together they have the time of one.
        try:
            behind.close(time.monotonic() - began_s)
        except BaseException as error:  # noqa: BLE001 - such as Ctrl-C: the others are closed all the same
            failed = failed or error
    if failed is not None:
        raise failed


atexit.register(_flush_all)  # now, since what is registered while the interpreter ends is not called
