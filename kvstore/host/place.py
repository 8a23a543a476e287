"""The folder ``host`` of a root, through which the processes of one host share it; and whether they may.

The file system must be of this host alone: on a network file system two hosts would not see each other's locks, and a
mapped file is memory of one host. Every process that shares a root has a shared lock on its file FORMAT, which nobody
replaces. Files of ``host`` are made under the exclusive one, so when nobody uses the root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from kvstore.errors import RootMismatch, Unavailable

FOLDER = "host"
HOLDS = f"{FOLDER}/holds"
SHARED = f"{FOLDER}/shared"
EVICTING = f"{FOLDER}/evicting.lock"
COLLECTOR = f"{FOLDER}/collector.lock"
CLEARS = f"{FOLDER}/clears"


class Lock(Protocol):
    """A file that this process has locked."""

    def forget(self) -> None:
        """Closes it in a forked child, which shares the lock."""
        ...


FORGOTTEN_BY_CHILDREN: WeakSet[Lock] = WeakSet()
"""The locks of this process: its forked children must not keep them."""


def _forget_all() -> None:
    for lock in list(FORGOTTEN_BY_CHILDREN):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)

JOIN_S = 10.0
"""Time for another process to make the files."""

_LOCAL = {
    0xEF53: "ext4",  # ext2 and ext3 too
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0xF2F52010: "F2FS",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
}
"""File systems that one kernel alone writes to, by their number in statfs(2)."""
_SHARED = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE, such as GlusterFS, MooseFS or virtiofs",
    0x01021997: "9p",
    0x0BD00BD0: "Lustre",
    0x00C36400: "CephFS",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
}
"""File systems that other hosts may write to as well; only for messages."""
_STATFS_BYTES = 256  # more than the structure has


def why_not_shared(folder: str) -> str | None:
    """Returns why the processes of this host cannot share ``folder`` without etcd; None if they can.

    A file system that is not known as local is refused. Raises Unavailable if the folder cannot be looked at.
    """
    if sys.platform != "linux":
        return "only Linux tells which file systems are local: use etcd"
    number = _file_system(folder)
    if number not in _LOCAL:
        name = _SHARED.get(number, f"a file system of type {number:#x}")
        return f"{folder} is on {name}, which other hosts may write to as well: use etcd"
    return None


class InUse:
    """The lock of a process that shares the root at ``folder``, from ``join`` to ``close``."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/FORMAT"
        self._fd = -1

    def join(self, is_made: Callable[[], bool], make: Callable[[], None]) -> None:
        """Takes the lock. Where the files of ``host`` are not ``is_made``, makes them while nobody uses the root.

        Raises RootMismatch if they are missing while others use the root, and OSError.
        """
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        FORGOTTEN_BY_CHILDREN.add(self)
        ends_s = time.monotonic() + JOIN_S
        while True:
            if _locked(self._fd, fcntl.LOCK_SH) and is_made():
                return
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            if _locked(self._fd, fcntl.LOCK_EX) and not is_made():
                make()
            elif time.monotonic() > ends_s:
                raise RootMismatch(
                    f"{os.path.dirname(self._path)}/{FOLDER} was removed or damaged while other processes use the root:"
                    " end them, and open it again"
                )
            time.sleep(0.01)

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    forget = close


def is_in_use(folder: str) -> bool:
    """True while processes of this host share the root at ``folder`` without etcd. Raises OSError."""
    fd = os.open(f"{folder}/FORMAT", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return not _locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_system(folder: str) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(folder), buffer) != 0:
        raise Unavailable(f"could not look at the file system of {folder}: {os.strerror(ctypes.get_errno())}")
    return int(ctypes.c_ulong.from_buffer(buffer).value) & 0xFFFFFFFF
