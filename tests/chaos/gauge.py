"""Measures repeatedly how many bytes the chunks on a root take."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

Sample = tuple[float, int]


def used_bytes(root: Path) -> int:
    """The sum of all chunk files; 0 before the first put."""
    total, chunks = 0, root / "chunks"
    for folder in os.scandir(chunks) if chunks.exists() else ():
        for entry in os.scandir(folder.path):
            try:
                total += entry.stat().st_size
            except OSError:
                pass  # swept since it was listed
    return total


class Gauge:
    """Samples until it is closed."""

    def __init__(self, root: Path, every_s: float) -> None:
        self._root = root
        self._every_s = every_s
        self._ended = threading.Event()
        self.samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, name="gauge", daemon=True)
        self._thread.start()

    @property
    def most(self) -> int:
        """The highest sample."""
        return max((size for _, size in self.samples), default=0)

    def close(self) -> None:
        """Samples no more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.samples.append((time.monotonic(), used_bytes(self._root)))
            except OSError:
                pass  # a distributed file system may refuse now and then
