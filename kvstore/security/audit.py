"""The audit log: one JSON line for each administrative act, each denial and each reload; rotated by size.

Separate from the log of the worker, because it is evidence: its file is readable only by the worker's account, and
holds no token, no prompt and no key. A thread writes it, so that no call waits for a disk.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from kvstore.core.executor import Tasks
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

    ``on_lost`` may be set; it is called for each line that could not be written. Raises InvalidRequest if the file
    cannot be written.
    """

    def __init__(self, path: str | Path | None, *, bytes_max: int = BYTES_MAX, kept_max: int = KEPT_MAX) -> None:
        self.has_file = path is not None
        """True if entries go to a file of their own."""
        self.on_lost: Callable[[], None] = lambda: None
        self._tasks: Tasks | None = None
        self._file: _PrivateFile | None = None
        if path is not None:
            try:
                self._file = _PrivateFile(path, bytes_max, kept_max, self._lost)
            except OSError as cause:
                raise InvalidRequest(f"cannot write the audit log {str(path)!r}: {cause.strerror or cause}") from cause
            self._tasks = Tasks("kvstore-audit", 1, QUEUE_MAX)

    def write(self, event: str, **fields: Any) -> None:
        """Queues one line. Omits ``fields`` that are None, and cuts long text."""
        entry: Mapping[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            **fields,
        }
        line = json.dumps({name: _short(value) for name, value in entry.items() if value is not None})
        if self._tasks is None:
            log.info("audit %s", line)
            return
        assert self._file is not None, "the thread starts with a file"
        record = logging.LogRecord(log.name, logging.INFO, "", 0, line, None, None)
        if not self._tasks.submit(partial(self._file.emit, record)):
            self.on_lost()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all lines so far are in the file; True if that was in time."""
        return self._tasks is None or self._tasks.drain(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what waits and ends the thread. Idempotent."""
        tasks, self._tasks = self._tasks, None
        if tasks is not None and not tasks.close(timeout_s):
            return  # the disk hangs, and the thread with it
        if self._file is not None:
            with suppress(OSError):  # the lines that a full disk did not take were counted
                self._file.close()

    def _lost(self) -> None:
        self.on_lost()


class _PrivateFile(RotatingFileHandler):
    """The rotated files, which only their owner may read."""

    def __init__(self, path: str | Path, bytes_max: int, kept_max: int, on_lost: Callable[[], None]) -> None:
        super().__init__(path, maxBytes=bytes_max, backupCount=kept_max, encoding="ascii")
        self._on_lost = on_lost

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=partial(os.open, mode=0o600))

    def handleError(self, _: logging.LogRecord) -> None:
        log.error("audit.not_written %s: %s", self.baseFilename, sys.exc_info()[1])
        self._on_lost()


def _short(value: Any) -> Any:
    return value[:TEXT_MAX] if isinstance(value, str) else value
