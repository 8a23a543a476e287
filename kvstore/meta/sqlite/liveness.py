"""Whether a client of the file is there: a lock that the kernel drops when the client is closed, or its process ends.

Each client locks one byte of a file beside the metadata. The lock is one of an open file description (F_OFD_SETLK in
fcntl(2)): two clients of one process see each other's, and it stays when other descriptors of the file are closed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import struct
from contextlib import suppress
from typing import NamedTuple

from kvstore.format.places import METADATA_LIVENESS
from kvstore.meta.sqlite.making import make_empty

_BYTE_BITS = 62
_FLOCK = "hhqqi0q"
"""``struct flock``: type, whence, start, length, process."""


class Owner(NamedTuple):
    """Names a client by the byte that it has locked, and the inode of the file: another file may take the name."""

    byte: int
    inode: int


NOBODY = Owner(0, 0)
"""The owner of what nobody can judge."""


class Liveness:
    """The lock of one client, and the eye on those of others. One thread, but for ``close`` in a forked child."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, METADATA_LIVENESS)
        self._byte = 1 + secrets.randbits(_BYTE_BITS)
        self._owner = NOBODY
        self._files: list[int] = []
        """The last one has the name. The others keep their inode from being given to a new file."""

    def owner(self) -> Owner:
        """Returns who this client is; NOBODY if there can be no such lock."""
        try:
            file, inode = self._file()
            if self._owner.inode != inode:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(self._byte))
                self._owner = Owner(self._byte, inode)
        except OSError:
            return NOBODY
        return self._owner

    def is_gone(self, owner: Owner) -> bool:
        """True if that client was closed, or its process has ended. False if nobody can tell."""
        if owner.byte in (NOBODY.byte, self._byte):
            return False
        try:
            file, inode = self._file()
            if inode != owner.inode:
                return False
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock(owner.byte))
        except OSError:
            return False
        return bool(struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK)

    def close(self) -> None:
        """Lets the lock go. In a forked child it only closes what the child inherited: the lock is the parent's."""
        files, self._files, self._owner = self._files, [], NOBODY
        for file in files:
            os.close(file)

    def _file(self) -> tuple[int, int]:
        """Returns the file that has the name now, and its inode; makes it. Raises OSError."""
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process was faster
                make_empty(self._path)
            status = os.lstat(self._path)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(self._path)
        if not self._files or os.fstat(self._files[-1]).st_ino != status.st_ino:
            self._files.append(os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        return self._files[-1], os.fstat(self._files[-1]).st_ino


def _lock(byte: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
