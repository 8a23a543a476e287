"""New files beside the metadata, which all who may write to the folder may write to."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import Unavailable

RETRY_S = 0.01


def make_empty(path: str) -> None:
    """Makes an empty file. Raises FileExistsError, OSError.

    Whoever may write to the folder may write to the file, also where a command of the administrator made it.
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
def locked(folder: str, timeout_s: float) -> Iterator[None]:
    """While it lasts, no other process makes a file in ``folder``. Raises Unavailable, OSError."""
    ends_s = time.monotonic() + timeout_s
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while not _is_locked(descriptor):
            if time.monotonic() >= ends_s:
                raise Unavailable(
                    f"another process has been making a file in {folder} for too long (is one stopped?): the call may "
                    "be repeated"
                )
            time.sleep(RETRY_S)
        yield
    finally:
        os.close(descriptor)  # lets the lock go


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        if cause.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
