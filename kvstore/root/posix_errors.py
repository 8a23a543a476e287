"""The errors of a mounted file system: which mean that a file is missing, and which error of ours each becomes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import KVStoreError, Overloaded, PermissionDenied, StoreFull, Unavailable

MISSING_ERRORS = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ENOTDIR, errno.ELOOP})
FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
SHORT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
REFUSED_ERRORS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class DiskFull(StoreFull):
    """The file system has no room, or the user's quota is used up. ``said`` is the error without advice."""

    def __init__(self, said: str) -> None:
        super().__init__(f"{said}; free space on the root (kvstore-gc, or a larger quota)")
        self.said = said


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Translates the kernel's errors within the block into errors that a caller can act on."""
    try:
        yield
    except OSError as cause:
        raise error_of(action, path, cause) from cause


def error_of(action: str, path: str, cause: OSError) -> KVStoreError:
    """Returns the caller's error for one of the kernel's; ``action`` is a verb, such as "read"."""
    said = f"could not {action} {path}: {cause.strerror or cause}"
    if cause.errno in FULL_ERRORS:
        return DiskFull(said)
    if cause.errno in SHORT_ERRORS:
        return Overloaded(f"{said}; this process or host is short of files or memory: raise its limits (ulimit -n)")
    if cause.errno in REFUSED_ERRORS:
        return PermissionDenied(f"{said}; check the mount options and the owner of the root")
    return Unavailable(f"{said}; check the mount (kvstore check-root)")
