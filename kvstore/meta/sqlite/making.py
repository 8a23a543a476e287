"""New files beside the metadata, which all who may write to the folder may write to."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvstore.errors import Unavailable

RETRY_S = 0.01


def make_empty(path: str) -> None:
    """Makes an empty file. Raises FileExistsError, OSError.

    It gets the folder's owner and permissions: all who may write to the folder may write to it, even if root made it.
    """
    folder = os.stat(os.path.dirname(path))
    mode = folder.st_mode & 0o660
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
    try:
        os.fchmod(file, mode)
        if os.geteuid() == 0:
            os.fchown(file, folder.st_uid, folder.st_gid)
    finally:
        os.close(file)


@contextmanager
def locked(path: str, timeout_s: float) -> Iterator[int]:
    """While it lasts, no other process has this lock on the file, which is made; gives its descriptor.

    Raises Unavailable, OSError.
    """
    ends_s = time.monotonic() + timeout_s
    while True:
        with suppress(FileExistsError):
            make_empty(path)
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _is_locked(file) and _has_name(file, path):
                yield file
                return
        finally:
            os.close(file)  # lets the lock go
        if time.monotonic() >= ends_s:
            raise Unavailable(
                f"another process has had {path} locked for too long (is one stopped?): the call may be repeated"
            )
        time.sleep(RETRY_S)


def _has_name(file: int, path: str) -> bool:
    """True unless the file was removed, or replaced, while we waited for its lock."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        if cause.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
