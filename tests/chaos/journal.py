"""The promises of a process, one JSON object a line, in a file that outlives it.

A promise is written once it is made, and its end before anything that may end it. So if a promise is broken after the
whole journal was read, it was in force.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VIOLATION = "VIOLATION"
COUNTS = "counts"
LONGEST = "longest"
"""The longest action of each kind until now, seconds."""

Fact = dict[str, Any]


class Journal:
    """The writing end. Each fact is one write, which a SIGKILL does not tear."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, fact: str, **details: object) -> None:
        """Appends one fact with the time, which all processes of a host share."""
        line = json.dumps({"fact": fact, "at_s": time.monotonic(), **details}) + "\n"
        os.write(self._file, line.encode())


class Journals:
    """The reading end of all journals in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[tuple[str, Fact]]:
        """Returns the entries written since the last call, with the name of the journal."""
        for path in sorted(self._folder.glob("*.journal")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                yield path.stem, json.loads(line)
