"""What calls of SGLang moved, and how fast, for its own metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

CALLS_MAX = 1024
"""Calls whose figures are kept; SGLang asks for them only with ``--enable-metrics``."""
GIB = 1 << 30


class Moves:
    """Pages and GiB/s of each call since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)

    def timed(self, page_bytes: int, call: Callable[[], list[bool]]) -> list[bool]:
        """Returns the call's result, which says of each page whether it was moved."""
        began_s = time.perf_counter()
        moved = call()
        if count := sum(moved):
            self._calls.append((count, count * page_bytes / GIB / (time.perf_counter() - began_s)))
        return moved

    def take(self) -> tuple[list[int], list[float]]:
        """Takes out the pages of each call, and its GiB/s, while other threads may add some."""
        taken = [self._calls.popleft() for _ in range(len(self._calls))]
        return [pages for pages, _ in taken], [rate for _, rate in taken]
