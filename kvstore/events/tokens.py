"""The tokens of chunks in a file without a name, as many in each line: memory that the kernel may take back.

A snapshot needs them, a difference only those of new chunks. In columns they would be most of the publisher's memory.
"""

from __future__ import annotations

import tempfile
from typing import IO

import numpy as np
import numpy.typing as npt

from kvstore.brief import why
from kvstore.errors import InvalidRequest
from kvstore.events.table import Rows

ROOM_MIN = 1_024


class TokenFile:
    """Lines of ``width`` tokens, by row. Used by one thread, or under its owner's lock."""

    def __init__(self, width: int, folder: str | None) -> None:
        self.width = width
        self._folder = folder
        self._file = _nameless(folder)
        self._lines: npt.NDArray[np.uint32] = np.zeros((0, width), np.uint32)

    def write(self, rows: Rows, tokens: npt.NDArray[np.uint32]) -> None:
        """Sets the lines of ``rows``."""
        if len(rows):
            highest = int(rows.max()) + 1
            if highest > len(self._lines):
                self._lines = self._mapped(self._file, max(ROOM_MIN, highest + highest // 4))
            self._lines[rows] = tokens

    def read(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Returns the lines of ``rows``, which were set."""
        found: npt.NDArray[np.uint32] = self._lines[rows]
        return found

    def keep(self, rows: Rows) -> None:
        """Keeps the lines of ``rows`` alone, in this order."""
        file = _nameless(self._folder)
        lines = self._mapped(file, max(ROOM_MIN, len(rows)))
        set_rows = np.flatnonzero(rows < len(self._lines))
        for start in range(0, len(set_rows), ROOM_MIN):
            part = set_rows[start : start + ROOM_MIN]
            lines[part] = self._lines[rows[part]]
        self.close()
        self._file, self._lines = file, lines

    def close(self) -> None:
        """Gives the file back."""
        self._lines = np.zeros((0, self.width), np.uint32)
        self._file.close()

    def _mapped(self, file: IO[bytes], count: int) -> npt.NDArray[np.uint32]:
        file.truncate(count * self.width * 4)
        return np.memmap(file, np.uint32, "r+", shape=(count, self.width))


def _nameless(folder: str | None) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder, prefix="kvstore-events-")
    except OSError as cause:
        raise InvalidRequest(f"no file can be made in {folder or tempfile.gettempdir()!r}: {why(cause)}") from cause
