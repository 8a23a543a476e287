"""Ctrl-C of a benchmark: one line and exit code 130."""

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
