"""The kernel's word on the file system of a path."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo; ``options`` are those of the file system, such as NFS's ``lookupcache``."""

    type: str = ""
    options: tuple[str, ...] = ()


def mount_of(path: str) -> Mount:
    """Returns the mount that holds ``path``; an empty one if it is unknown."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.split()
                if fields[2] == wanted:
                    end = fields.index("-")
                    return Mount(fields[end + 1], tuple(fields[end + 3].split(",")))
    except (OSError, ValueError, IndexError):
        pass
    return Mount()


def file_system_type(path: str) -> str:
    """Returns the type of the file system that holds ``path``; empty if it is unknown."""
    return mount_of(path).type


def sync_file_system(path: str) -> None:
    """Writes all of a file system to its device (syncfs). Raises OSError, also for what failed to be written before."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(fd)
