"""The audit log: one JSON line for each administrative act, each denial and each reload; rotated by size.

Separate from the log of the worker, because it is evidence: it goes to a separate file that nobody else may read, and
holds no token, no prompt and no key. A thread writes it, so that no call waits for a disk.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.background import Tasks
from kvstore.errors import InvalidRequest

log = logging.getLogger(__name__)

BYTES_MAX = 64 << 20
"""Size at which the file becomes ``NAME.1``, that one ``NAME.2``, and so on."""
KEPT_MAX = 4
QUEUE_MAX = 10_000
"""Lines that may wait for the disk; more are lost, and counted."""
TEXT_MAX = 512
"""Limit on the characters of one value: callers choose some values."""


class AuditLog:
    """Writes entries to ``path``, or, if it is None, to the log of this process. Thread-safe.

    ``on_lost`` may be set; it is called for each line that could not be written.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        bytes_max: int = BYTES_MAX,
        kept_max: int = KEPT_MAX,
    ) -> None:
        self._path = Path(path) if path is not None else None
        self.has_file = path is not None
        """True if entries go to a file of their own."""
        self.on_lost: Callable[[], None] = lambda: None
        self._now = now
        self._bytes_max = bytes_max
        self._kept_max = kept_max
        self._tasks: Tasks | None = None
        self._fd = -1
        self._size_bytes = 0

    def open(self) -> None:
        """Opens the file. Raises InvalidRequest if it cannot be written."""
        if self._path is None or self._tasks is not None:
            return
        try:
            self._open(self._path)
        except OSError as cause:
            raise InvalidRequest(
                f"cannot write the audit log {str(self._path)!r}: {cause.strerror or cause}"
            ) from cause
        self._tasks = Tasks("kvstore-audit", 1, QUEUE_MAX)

    def write(self, event: str, **fields: Any) -> None:
        """Queues one line. Omits ``fields`` that are None, and cuts long text."""
        entry: Mapping[str, Any] = {"time": self._now().isoformat(timespec="milliseconds"), "event": event, **fields}
        line = json.dumps({name: _short(value) for name, value in entry.items() if value is not None})
        if self._tasks is None:
            log.info("audit %s", line)
        elif not self._tasks.submit(partial(self._append_line, line.encode() + b"\n")):
            self.on_lost()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all lines so far are in the file; True if that was in time."""
        return self._tasks is None or self._tasks.drain(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what waits and ends the thread. Idempotent."""
        tasks, self._tasks = self._tasks, None
        if tasks is not None and not tasks.close(timeout_s):
            return  # the disk hangs, and the thread with it
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # On the writing thread

    def _append_line(self, line: bytes) -> None:
        assert self._path is not None, "the thread starts with a file"
        try:
            self._append(self._path, line)
        except OSError as error:
            log.error("audit.not_written %s: %s", self._path, error)
            self.on_lost()

    def _append(self, path: Path, line: bytes) -> None:
        if self._size_bytes and self._size_bytes + len(line) > self._bytes_max:
            self._rotate(path)
        if self._fd < 0:
            self._open(path)
        left = memoryview(line)
        while left:
            count = os.write(self._fd, left)
            self._size_bytes += count
            left = left[count:]

    def _rotate(self, path: Path) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
        for number in range(self._kept_max - 1, 0, -1):
            older = _numbered(path, number)
            if older.exists():
                older.replace(_numbered(path, number + 1))
        path.replace(_numbered(path, 1))

    def _open(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(self._fd).st_size


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _short(value: Any) -> Any:
    return value[:TEXT_MAX] if isinstance(value, str) else value
