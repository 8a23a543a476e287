"""Records which files and functions of kvstore one call enters, on every thread that works for it."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvstore
from tests.kit.patience import eventually

PACKAGE = f"{Path(kvstore.__file__).parent}/"
GENERATED = f"{PACKAGE}v1/"
BACKGROUND = (
    *("kvstore-refresh", "kvstore-follower", "kvstore-behind", "kvstore-demote", "kvstore-disk-refill"),
    *("kvstore-worker", "kvstore-leases", "kvstore-renewing", "kvstore-endpoints"),
    *("kvstore-arena", "kvstore-pages", "kvstore-clears", "kvstore-collecting", "session", "presence"),
)
"""Beginnings of the names of threads that no call waits for.  Any other thread counts, so that work which moves to a
new thread stays in the count.
"""
LATE = {
    ("transport/channel.py", "Channel._again"),
    ("transport/channel.py", "Channel._wait"),
    ("transport/channel.py", "Channel.give_back"),
    ("worker/data_server.py", "BulkListener._turn"),
}
"""Entered or not by how the bytes of a message happen to arrive, or by how long a round takes: a busy machine
decides."""
POOLS = ("kvstore-io", "kvstore-call", "kvstore-bulk-")
LISTENER = "kvstore-bulk-listener"
ROUNDS = 9
STILL_S = 0.005

Function = tuple[str, str]
"""A file below ``kvstore/``, and the qualified name of a function in it."""


class Recorder:
    """Sees the calls of every thread that starts while it is installed, and of the caller during a round."""

    def __init__(self) -> None:
        self._is_on = False
        self._entered: set[CodeType] = set()
        self._deep: Counter[int] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Threads that start within are seen. To be entered before a store is opened."""
        threading.setprofile(self._see)
        try:
            yield
        finally:
            threading.setprofile(None)

    def typical(self, call: Callable[[Any], object], prepared: Callable[[], Any] = lambda: None) -> set[Function]:
        """Returns the functions that more than half of the rounds enter, after two rounds to warm up.

        Neither what a round does now and then (a lock that is waited for, an event of the follower), nor what a round
        missed because the machine is busy, changes the result.
        """
        for _ in range(2):
            self._round(call, prepared())
        seen = Counter(each for _ in range(ROUNDS) for each in self._round(call, prepared()))
        return {function for function, count in seen.items() if count > ROUNDS // 2} - LATE

    def _round(self, call: Callable[[Any], object], given: Any) -> set[Function]:
        self._entered = set()
        self._is_on = True
        sys.setprofile(self._see)
        try:
            call(given)
        finally:
            sys.setprofile(None)
        # A worker answers first and closes its books after that: this belongs to the call.
        self._await_idle()
        self._is_on = False
        return {
            (code.co_filename.removeprefix(PACKAGE), code.co_qualname)
            for code in self._entered
            if not code.co_name.startswith("<") or code.co_name == "<lambda>"  # comprehensions differ by Python
        }

    def _await_idle(self) -> None:
        """Waits until each thread of a pool is back in its loop, and nothing was entered for a moment."""
        while True:
            eventually(lambda: all(depth <= 1 for depth in [*self._deep.values()]), "the end of a call")
            count = len(self._entered)
            time.sleep(STILL_S)
            if len(self._entered) == count:
                return

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        name = threading.current_thread().name
        if name.startswith(POOLS) and name != LISTENER:
            self._deep[threading.get_ident()] += 1 if event == "call" else -1
        is_counted = not code.co_filename.startswith(GENERATED) and not name.startswith(BACKGROUND)
        if self._is_on and event == "call" and is_counted:
            self._entered.add(code)


def files_of(functions: set[Function]) -> list[str]:
    """The files that these functions are in."""
    return sorted({file for file, _ in functions})
