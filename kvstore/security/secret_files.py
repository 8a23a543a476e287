"""Files that hold secrets: who else may read them, and whether they have changed.

Separate from their content, because keys, tokens, certificates and access files all follow the same rule (X2).
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvstore.errors import InvalidRequest

FILE_BYTES_MAX = 1 << 20
LOOK_S = 1.0
"""Shortest time between two looks whether a file has changed."""


def read_secret(path: str | Path, what: str, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Returns the content of a file that nobody else may read. Raises InvalidRequest, which never shows the content.

    The rule is PostgreSQL's: a file of ours gives no rights to group and others; a file of root's may be readable by
    its group, as Kubernetes and systemd hand secrets to processes that are not root.
    """
    return _read(path, what, bytes_max, _check_secret)


def read_trusted(path: str | Path, what: str, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Returns the content of a file that everybody may read and nobody else may change: certificates, access files.

    Raises InvalidRequest.
    """
    return _read(path, what, bytes_max, _check_trusted)


class Watched:
    """Some files, and whether any of them has changed since the last question. Thread-safe; follows links."""

    def __init__(self, paths: Iterable[str | Path], look_s: float = LOOK_S) -> None:
        self._paths = tuple(map(str, paths))
        self._look_s = look_s
        self._lock = threading.Lock()  # guards the stats of the last look
        self._seen: tuple[tuple[int, ...], ...] | None = None
        self._look_at_s = 0.0

    def changed(self) -> bool:
        """True if a file changed since the last call; False on the first call. Looks at most once a second."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._look_at_s:
                return False
            self._look_at_s = now_s + self._look_s
            seen, self._seen = self._seen, tuple(map(_state, self._paths))
            return seen is not None and seen != self._seen


def _read(
    path: str | Path, what: str, bytes_max: int, check: Callable[[str | Path, str, os.stat_result], None]
) -> bytes:
    try:
        # Check the open file: a moment later the path may name another file.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"the {what} {str(path)!r} is not a regular file")
            check(path, what, status)
            with open(fd, "rb", closefd=False) as file:
                content = file.read(bytes_max + 1)
        finally:
            os.close(fd)
    except InvalidRequest:
        raise
    except OSError as cause:
        raise InvalidRequest(f"cannot read the {what} {str(path)!r}: {cause.strerror or cause}") from cause
    except ValueError as cause:  # a NUL, or half a character
        raise InvalidRequest(f"cannot read the {what} {str(path)!r}: this is no path") from cause
    if len(content) > bytes_max:
        raise InvalidRequest(f"the {what} {str(path)!r} is over {bytes_max} bytes")
    return content


def _check_secret(path: str | Path, what: str, status: os.stat_result) -> None:
    _check_owner(path, what, status)
    forbidden = stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid == 0:
        forbidden &= ~stat.S_IRGRP
    if status.st_mode & forbidden:
        raise InvalidRequest(
            f"the {what} {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read it: "
            f"expected 0600 or 0400 (or 0440 of root's): chmod 600 {path}"
        )


def _check_trusted(path: str | Path, what: str, status: os.stat_result) -> None:
    _check_owner(path, what, status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequest(
            f"the {what} {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}, so that others can change it: "
            f"chmod go-w {path}"
        )


def _check_owner(path: str | Path, what: str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise InvalidRequest(
            f"the {what} {str(path)!r} belongs to user {status.st_uid}: expected user {os.geteuid()}, or root"
        )


def _state(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a NUL, or half a character, is said by who reads it
        return ()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
