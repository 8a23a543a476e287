"""A cluster takes over a root of one host, once the processes that shared it have ended (rule C6)."""

from __future__ import annotations

import fcntl
import os
import struct

from kvstore.errors import RootMismatch
from kvstore.format.places import METADATA_LIVENESS
from kvstore.root.generations import newest_number
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot

_FLOCK = "hhqqi0q"
"""``struct flock``: type, whence, start, length (0: all that follows), process."""


def check_left(root: Root) -> None:
    """Raises RootMismatch while processes of this host share a root without etcd: a cluster does not see their holds.

    Once the root is a cluster's they protect and collect nothing there, so that it need not wait for them.
    """
    if isinstance(root, PosixRoot) and not newest_number(root) and _is_locked(f"{root.path}/{METADATA_LIVENESS}"):
        raise RootMismatch(
            f"{root.url} is in use by processes of this host that share it without etcd, and a cluster would not know "
            "what they hold: end them first, or leave out etcd (is KVSTORE_ETCD set?)"
        )


def _is_locked(path: str) -> bool:
    """True if anybody has a lock of an open file description on it. False if nobody can tell."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        finally:
            os.close(file)
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
