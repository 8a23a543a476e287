"""Ctrl-C of a benchmark: one line and exit code 130.

A terminal sends it to the programs that the benchmark started, too.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvstore.cli.ctrl_c import INTERRUPTED, Raises

PROGRAM = "kvstore bench"
ENDED = 143
"""The exit code after SIGTERM, as shells have it."""


@contextmanager
def ending() -> Iterator[None]:
    """Ends this program, once all within is undone, after Ctrl-C with one line, and after SIGTERM."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the undoing
        sys.exit(ENDED)

    signal.signal(signal.SIGTERM, end)
    try:
        with Raises():
            yield
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


@contextmanager
def unheard() -> Iterator[None]:
    """A program that is started within never hears Ctrl-C: who started it ends it. This one hears it afterwards."""
    heard = list[int]()
    # Another thread may take the signal, whose handler runs in this one: half of a start is no start.
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
