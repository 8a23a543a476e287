"""A cluster takes over a root of one host, once the processes that shared it have ended (rule C6)."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct

from kvstore.errors import RootMismatch
from kvstore.format.generation import Generation
from kvstore.format.places import GENERATIONS, HOST_GENERATIONS, METADATA_LIVENESS, Name
from kvstore.root.generations import newest_number, publish
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore.sources import Clock, Ids

log = logging.getLogger(__name__)

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


def publish_first(root: Root, generation: Generation, *, ids: Ids, clock: Clock, folder: Name) -> Generation:
    """Publishes as ``publish`` does; one of a cluster only if ``check_left`` allows it at this moment."""
    if folder == GENERATIONS:
        check_left(root)
        if not newest_number(root) and newest_number(root, HOST_GENERATIONS):
            log.warning("root.taken_over %s was of one host, without etcd: now it belongs to a cluster", root.url)
    return publish(root, generation, ids=ids, clock=clock, folder=folder)


def _is_locked(path: str) -> bool:
    """True if anybody has a lock of an open file description on it. Raises RootMismatch if nobody can tell."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as cause:
        raise _not_told(path, str(cause.strerror)) from cause
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _not_told(path, "it is not a file")
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(file)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _not_told(path: str, why: str) -> RootMismatch:
    return RootMismatch(
        f"{path} does not tell whether processes of this host share the root without etcd ({why}): end them, and "
        "remove it, or leave out etcd (is KVSTORE_ETCD set?)"
    )
