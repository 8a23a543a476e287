"""A thread that notes when it could not run: shows whether a call holds the GIL throughout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GAP_MIN_S = 0.001
ATTEMPTS_MAX = 20


class Heartbeat:
    """Beats as fast as it can, in a context; notes the gaps between beats."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._gaps: list[tuple[float, float]] = []
        self._last_s = 0.0

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def longest_gap(self, call: Callable[[], object]) -> float:
        """The longest time without a beat while ``call`` runs, as a share of all its time."""
        self._gaps.clear()
        began_s = time.perf_counter()
        call()
        ended_s = time.perf_counter()
        while self._last_s < ended_s:
            time.sleep(GAP_MIN_S)  # so that a gap that reaches to the end is noted
        inside = (min(end, ended_s) - max(begin, began_s) for begin, end in self._gaps)
        return max(inside, default=0.0) / (ended_s - began_s)

    def _beat(self) -> None:
        self._last_s = time.perf_counter()
        while not self._stop.is_set():
            now_s = time.perf_counter()
            if now_s - self._last_s > GAP_MIN_S:
                self._gaps.append((self._last_s, now_s))
            self._last_s = now_s


def others_run_during(call: Callable[[], object], attempts_max: int = ATTEMPTS_MAX) -> bool:
    """True if another thread runs while ``call`` does, which must take its time.

    A call that holds the GIL throughout leaves one gap as long as itself, always. One that does not leaves several
    gaps; on a busy machine one of them may be long, so some attempts are made.
    """
    with Heartbeat() as heartbeat:
        return any(heartbeat.longest_gap(call) < 0.7 for _ in range(attempts_max))
