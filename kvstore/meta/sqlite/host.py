"""What metadata in a file ask of the host: a file system of its own, and one clock for all of its processes."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from kvstore.errors import InvalidRequest, Unavailable

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

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OFFSETS = Path("/proc/self/timens_offsets")


def why_not_shared(folder: str) -> str | None:
    """Returns why the processes of this host cannot share metadata in a file in ``folder``; None if they can.

    A file system that is not known as local is refused: on a network file system two hosts would not see each other's
    locks, and the shared memory that SQLite uses is of one host. Raises Unavailable if the folder cannot be looked at.
    """
    if sys.platform != "linux":
        return "only Linux tells which file systems are local, and when it was booted: use etcd"
    number = _file_system(folder)
    if number not in _LOCAL:
        name = _SHARED.get(number, f"a file system of type {number:#x}")
        return f"{folder} is on {name}, which other hosts may write to as well: use etcd"
    try:
        boot_id()
    except InvalidRequest as reason:
        return str(reason)
    return None


def boot_id() -> str:
    """Returns an id that is new after each boot; leases of other boots have ended.

    Raises InvalidRequest if the host has none, or if this process has a clock of its own.
    """
    try:
        found = _BOOT.read_text().strip()
        offsets = _OFFSETS.read_text() if _OFFSETS.exists() else ""
    except OSError as cause:
        raise InvalidRequest(
            f"{cause.filename} cannot be read ({cause.strerror}), so no lease is safe: use etcd"
        ) from cause
    for line in offsets.splitlines():
        if line.split()[1:] != ["0", "0"]:
            # Leases end by CLOCK_BOOTTIME, which must be the same for all who share them.
            raise InvalidRequest("this process is in a time namespace, whose clock others do not have: use etcd")
    return found


def _file_system(folder: str) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(folder), buffer) != 0:
        raise Unavailable(f"could not look at the file system of {folder}: {os.strerror(ctypes.get_errno())}")
    return int(ctypes.c_ulong.from_buffer(buffer).value) & 0xFFFFFFFF
