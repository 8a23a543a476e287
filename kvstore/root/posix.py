"""A root on a mounted file system: a local disk, NFS, or any distributed file system with POSIX names.

``pwritev`` writes bytes straight from the caller's arrays.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_ISREG

from kvstore.core.buffers import BufferLoan, Pieces, byte_length, skip
from kvstore.errors import KVStoreError, Overloaded, PermissionDenied, StoreFull, Unavailable
from kvstore.format.places import FORMAT, QUARANTINE, Name
from kvstore.root.interface import (
    FileReader,
    FolderEntry,
    LocalFiles,
    Root,
    Seen,
    Stat,
    StorageSpace,
    Traits,
    fill,
    local_files,
)

# The kernel's word on the file system of a path.


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


# Files that a client of NFS believes to be absent, and how it is made to ask the server again.
#
# A client remembers that a name was not there for as long as it believes to know the folder (``acdirmin``: 30 s by
# default), so a chunk that another host stores in that time stays a miss. Opening the folder makes the client ask
# whether it changed (one GETATTR), and if it did, the next look at the name asks the server. ``statx`` of the file
# with AT_STATX_FORCE_SYNC does not help, as measured on Linux 6.1 with NFS 4.2.


FILE_SYSTEMS = frozenset({"nfs", "nfs4"})
FORGETTING = frozenset({"lookupcache=pos", "lookupcache=none"})
"""Mount options with which a client remembers no absence."""
FRESH_S = 0.5
"""How long an answer about a folder stands. A chunk of another host is found within this time."""
FOLDERS_MAX = 1 << 16
"""The times of more folders are not remembered, so that each miss in one asks."""


def remembers_absence(mount: Mount) -> bool:
    """True if the client of this mount believes for a while that a file is absent."""
    return mount.type in FILE_SYSTEMS and not FORGETTING & set(mount.options)


class Absence:
    """The folders of one root that the client asked for. Thread-safe: at worst two threads ask concurrently."""

    def __init__(self, path: str, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """``path`` is the root's folder."""
        self._path = path
        self._monotonic_s = monotonic_s
        self._asked_s: dict[str, float] = {}

    def may_be_old(self, path: str) -> bool:
        """Has the client ask for the folder of a file that was not found; True if another look may find it.

        False if it asked within the last ``FRESH_S``, or if the folder is not there either.
        Look once more, whatever the result: with a slow server it is always true.
        """
        folder = os.path.dirname(path)
        now_s = self._monotonic_s()
        if len(folder) < len(self._path) or now_s - self._asked_s.get(folder, -math.inf) < FRESH_S:
            return False
        if not _ask(folder) and not (self.may_be_old(folder) and _ask(folder)):
            return False
        if len(self._asked_s) >= FOLDERS_MAX:
            self._asked_s.clear()
        self._asked_s[folder] = now_s
        return True


def _ask(folder: str) -> bool:
    """Opens a folder; False if that fails: then the miss stands, whatever the reason."""
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


# The errors of a mounted file system: which mean that a file is missing, and which error of ours each becomes.


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
        return PermissionDenied(f"{said}; check mount options and owner: all processes must run under one account")
    return Unavailable(f"{said}; check the mount (kvstore check-root)")


# An open file of a mounted root: read straight into the caller's memory if that cannot block.
#
# A system call that hangs on a dead mount cannot be taken back: it would write into the caller's array long after the
# caller has given up (``BufferLoan``). So a read that may block fills memory of ours first.


IOV_MAX = os.sysconf("SC_IOV_MAX")
BOUNCE_BYTES = 1 << 20
"""Bytes of one blocking read; they stay in the processor's cache until they are copied on."""

RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)

_scratch = threading.local()


class PosixReader(FileReader):
    """An open file of a PosixRoot."""

    __slots__ = ("_fd", "_never_blocks", "_path", "stat")

    def __init__(self, fd: int, path: str, stat: Stat, never_blocks: bool) -> None:
        self._fd = fd
        self._path = path
        self._never_blocks = never_blocks
        self.stat = stat

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        wanted, done = byte_length(pieces), 0
        try:
            while done < wanted:
                count = self._read_cached(pieces, offset + done, borrowed)
                if count is None:
                    count = self._read_blocking(pieces, offset + done, borrowed, wanted - done)
                if not count:
                    break
                done += count
                if done < wanted:
                    pieces = skip(pieces, count)
        except OSError as cause:
            if cause.errno not in MISSING_ERRORS:
                raise error_of("read", self._path, cause) from cause
        return done

    def prefix(self, size_bytes: int) -> bytes:
        """Returns the file's first bytes, fewer if it became shorter. The memory is ours, so the call may block."""
        found = b""
        try:
            while len(found) < size_bytes and (more := os.pread(self._fd, size_bytes - len(found), len(found))):
                found += more
        except OSError as cause:
            if cause.errno not in MISSING_ERRORS:
                raise error_of("read", self._path, cause) from cause
        return found

    def _read_cached(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int | None:
        """Reads cached bytes straight into ``pieces``; None if nothing is cached."""
        if not (self._never_blocks or RWF_NOWAIT):
            return None
        with borrowed.writing():
            try:
                count = os.preadv(self._fd, pieces[:IOV_MAX], offset, 0 if self._never_blocks else RWF_NOWAIT)
                # Linux 5.9 and 5.10 say 0 in the middle of a file too: only a read that may block knows its end.
                return count if count or self._never_blocks else None
            except OSError as cause:
                # Not cached, or a file system without RWF_NOWAIT (NFS, FUSE): read in a way that may block.
                if cause.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                    return None
                raise

    def _read_blocking(self, pieces: Pieces, offset: int, borrowed: BufferLoan, wanted: int) -> int:
        """Reads up to BOUNCE_BYTES through memory of ours, and copies them on while they are in the cache."""
        with suppress(OSError):
            os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_WILLNEED)
        scratch = _scratch_buffer()
        borrowed.check()
        count = os.preadv(self._fd, [memoryview(scratch)[: min(wanted, BOUNCE_BYTES)]], offset)
        with borrowed.writing():
            fill(pieces, memoryview(scratch)[:count])
        return count

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def __enter__(self) -> PosixReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scratch_buffer() -> bytearray:
    """Returns this thread's bounce buffer."""
    buffer: bytearray | None = getattr(_scratch, "buffer", None)
    if buffer is None:
        buffer = _scratch.buffer = bytearray(BOUNCE_BYTES)
    return buffer


FILE_MODE, FOLDER_MODE = 0o660, 0o770
"""KV tensors reveal prompts, so other users may not read them. The umask takes away more: 022 leaves the group reading
only. Native code has the same two."""


class PosixRoot(Root):
    """A folder. ``step`` is called at named points between system calls, so that a test can stop there.

    The points are stage.created, stage.written, stage.complete, publish.before, publish.linked, publish.done.

    ``direct``: native reads of uncached data go around the page cache (O_DIRECT), if the file system can.
    """

    def __init__(self, path: str | Path, *, step: Callable[[str], None] | None = None, direct: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.url = f"file://{self.path}"
        mount = mount_of(self.path)
        self.traits = Traits(
            exclusive_publish=True,
            ordered_publish=True,
            touch=True,
            mapped=mount.type not in FILE_SYSTEMS,  # a file that another host removed would end this process (SIGBUS)
            fenced=True,
            conditional_remove=False,
        )
        self._step = step or (lambda point: None)
        self._format = _content(f"{self.path}/{FORMAT}")
        # Memory has no device to wait for, and tmpfs does not know RWF_NOWAIT.
        self._never_blocks = mount.type in MEMORY_FILE_SYSTEMS
        self._absence = Absence(self.path) if remembers_absence(mount) else None
        self.local_files: LocalFiles | None = None
        if type(self) is PosixRoot:  # a subclass may treat files in its own way, so it must be asked for each
            self.local_files = LocalFiles(
                self.path, self._never_blocks, stages=step is None, direct=direct, knows_absence=self._absence is None
            )

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        path = self._at(name)
        with translated("write", path):
            fd = self._create(path)
            try:
                self._step("stage.created")
                _write_all(fd, pieces)
                self._step("stage.written")
                os.utime(fd, ns=(stamp_ns, stamp_ns))
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            self._step("stage.complete")

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        source, path = self._at(staged), self._at(name)
        self._step("publish.before")
        with translated("publish", path):
            try:
                self._link(source, path)
                won = True
            except FileExistsError:
                won = self._move_obstacle(source, path)
            self._step("publish.linked")
            if won and durable:
                _sync_folder(os.path.dirname(path))
            with suppress(FileNotFoundError):
                os.unlink(source)
        if name == FORMAT:
            self._format = _content(path)
        self._step("publish.done")
        return won

    def open(self, name: Name) -> PosixReader | None:
        path, fd = self._at(name), -1
        try:
            # O_NONBLOCK: a chunk's name that is not a file must not block us. O_NOFOLLOW: none of our files is a link,
            # so a link leads to something foreign.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            try:
                fd = os.open(path, flags)
            except OSError as cause:
                absence = self._absence if cause.errno in MISSING_ERRORS else None
                if absence is None or not absence.may_be_old(path):
                    raise
                fd = os.open(path, flags)
            status = os.fstat(fd)
        except OSError as cause:
            if fd >= 0:
                os.close(fd)
            if cause.errno in MISSING_ERRORS:
                return None
            raise error_of("open", path, cause) from cause
        if not S_ISREG(status.st_mode):
            os.close(fd)
            return None
        return PosixReader(fd, path, Stat(status.st_size, status.st_mtime_ns), self._never_blocks)

    def stat(self, name: Name) -> Stat | None:
        path = self._at(name)
        try:
            try:
                status = os.lstat(path)
            except OSError as cause:
                absence = self._absence if cause.errno in MISSING_ERRORS else None
                if absence is None or not absence.may_be_old(path):
                    raise
                status = os.lstat(path)
        except OSError as cause:
            if cause.errno in MISSING_ERRORS:
                return None
            raise error_of("look at", path, cause) from cause
        return Stat(status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else None

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        reader = self.open(name)
        if reader is None:
            return None
        size_bytes = min(size_bytes, reader.stat.size_bytes)
        with reader:
            prefix = reader.prefix(size_bytes)
        # Too few bytes: the file was deleted under us, on a file system where that ends reading.
        return Seen(reader.stat, prefix, None) if len(prefix) == size_bytes else None

    def touch(self, name: Name, stamp_ns: int) -> bool:
        try:
            os.utime(self._at(name), ns=(stamp_ns, stamp_ns))
        except OSError as cause:
            # Renewal only advises garbage collection; a read-only or foreign-owned root must not fail a read.
            if cause.errno in MISSING_ERRORS or cause.errno in REFUSED_ERRORS:
                return False
            raise error_of("touch", self._at(name), cause) from cause
        return True

    def mark(self, name: Name) -> bool:
        """Renews the time of a file's last change (ctime) and nothing else; False if the file is gone."""
        path = self._at(name)
        try:
            os.chmod(path, S_IMODE(os.stat(path).st_mode))
        except OSError as cause:
            if cause.errno in MISSING_ERRORS:
                return False
            raise error_of("mark", path, cause) from cause
        return True

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        path = self._at(name)
        with translated("move", path):
            for attempt in range(2 if make_folder else 1):
                try:
                    os.rename(self._at(source), path)
                except OSError as cause:
                    if cause.errno not in MISSING_ERRORS:
                        raise
                    if make_folder and not attempt:
                        self._make_folder(path)
                else:
                    return True
        return False

    def make_folder(self, name: Name) -> None:
        path = self._at(name)
        with translated("make", path):
            self._make_folder(f"{path}/.")

    def remove(self, name: Name) -> bool:
        path = self._at(name)
        with translated("remove", path):
            try:
                os.unlink(path)
            except OSError as cause:
                if cause.errno in MISSING_ERRORS:
                    return False
                raise
        return True

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        path = self._at(name)
        with translated("remove", path):
            try:
                os.rmdir(path)
            except OSError as cause:
                if cause.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                if cause.errno not in MISSING_ERRORS:
                    raise
                if durable:
                    self._check_mounted()
            if durable:
                with suppress(FileNotFoundError):
                    _sync_folder(os.path.dirname(path))
        return True

    def list(self, folder: Name) -> Iterator[FolderEntry]:
        path = self._at(folder)
        with translated("list", path):
            if folder and os.path.islink(path):
                raise Unavailable(f"{path} is a symbolic link: the folders of a root must be its own")
            try:
                entries = os.scandir(path)
            except OSError as cause:
                # Not every error that means a missing file: what a mount loses for a moment is not an empty folder.
                if cause.errno in (errno.ENOENT, errno.ENOTDIR):
                    self._check_mounted()
                    return
                raise
            with entries:
                for entry in entries:
                    try:
                        status = None if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False)
                    except OSError as cause:
                        if cause.errno == errno.ENOENT:
                            continue
                        if cause.errno not in MISSING_ERRORS:
                            raise
                        # The file is listed, so it exists, although the look fails at the moment.
                        yield FolderEntry(entry.name, Stat(0, 0))
                        continue
                    yield FolderEntry(entry.name, status and Stat(status.st_size, status.st_mtime_ns))

    def sync(self) -> None:
        with translated("sync", self.path):
            sync_file_system(self.path)

    def space(self) -> StorageSpace:
        with translated("look at", self.path):
            status = os.statvfs(self.path)
        return StorageSpace(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def close(self) -> None:
        """Does nothing: no file is kept open between calls."""

    def _create(self, path: str) -> int:
        """Opens a new file, making its folder the first time.

        O_EXCL: without it, a name used twice would truncate the inode that is already published (rule W2).
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, FILE_MODE)
        except FileNotFoundError:
            self._make_folder(path)
            return os.open(path, flags, FILE_MODE)

    def _link(self, source: str, path: str) -> None:
        try:
            os.link(source, path)
        except FileNotFoundError:
            self._make_folder(path)
            os.link(source, path)

    def _move_obstacle(self, source: str, path: str) -> bool:
        """Sets aside what takes the name if it is not a file (a folder, a dangling link), and links."""
        try:
            if S_ISREG(os.lstat(path).st_mode):
                return False
            aside = f"{self.path}/{QUARANTINE}/{os.path.basename(path)}.{os.path.basename(os.path.dirname(source))}"
            self._make_folder(aside)
            os.rename(path, aside)
            os.link(source, path)
        except (FileNotFoundError, FileExistsError):
            return False  # another process was quicker; the next put looks again
        return True

    def _make_folder(self, path: str) -> None:
        """Makes the folder of a file, unless the root is no longer mounted.

        Otherwise a write would begin to fill the bare mount point. A later mount would hide those files, and so lose
        acknowledged puts.
        """
        self._check_mounted()
        folder = os.path.dirname(path)
        self._check_own(folder)
        if not os.path.isdir(os.path.dirname(folder)):
            self._make_folder(folder)
        try:
            os.mkdir(folder, FOLDER_MODE)
        except FileExistsError:
            if not os.path.isdir(folder):
                # Not FileExistsError, for callers that ask whether the file exists.
                raise NotADirectoryError(errno.ENOTDIR, "it exists and is not a folder", folder) from None

    def _check_own(self, folder: str) -> None:
        """Raises Unavailable if a folder of the root, or one above it, is a link, which may lead out of the root."""
        while len(folder) > len(self.path):
            if os.path.islink(folder):
                raise Unavailable(f"{folder} is a symbolic link: the folders of a root must be its own")
            folder = os.path.dirname(folder)

    def _check_mounted(self) -> None:
        """Raises Unavailable if this is not the root that was opened.

        An unmounted root has none of our folders, so a missing file there proves nothing (a fence that seems lifted is
        not).
        """
        expected = self._format  # before looking: another thread may publish FORMAT in between
        found = _content(f"{self.path}/{FORMAT}")
        if expected is None:
            self._format = self._format or found
        elif found != expected:
            raise Unavailable(
                f"{self.path} is not the root that was opened: is its file system still mounted, and its FORMAT whole?"
            )

    def _at(self, name: Name) -> str:
        return f"{self.path}/{name}"


def _content(path: str) -> bytes | None:
    """Returns a small file's content; None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16)
    except OSError:
        return None


def _write_all(fd: int, pieces: Pieces) -> None:
    offset = 0
    while pieces:
        count = os.pwritev(fd, pieces[:IOV_MAX], offset)
        offset += count
        pieces = skip(pieces, count)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Cheap looks at a shard's folder, for a reader that follows what changes: when it changed, and which names it has.


def folder_time(root: Root, folder: Name) -> int | None:
    """Returns when an entry of a folder last came or went, in ns by the file system's clock; 0 if there is no folder.

    None if the root cannot tell. Two changes within one tick of that clock (a few ms, on some file systems 2 s) look
    like one. Raises the root's errors.
    """
    local = local_files(root)
    if local is None:
        return None
    path = f"{local.path}/{folder}"
    try:
        return os.stat(path).st_mtime_ns
    except OSError as cause:
        if cause.errno in MISSING_ERRORS:
            return 0
        raise error_of("look at", path, cause) from cause


def list_names(root: Root, folder: Name) -> list[str]:
    """Returns the names in a folder, folders included; none if there is no such folder. Raises the root's errors."""
    local = local_files(root)
    if local is None:
        return [entry.name for entry in root.list(folder)]
    path = f"{local.path}/{folder}"
    if os.path.islink(path):
        raise Unavailable(f"{path} is a symbolic link: the folders of a root must be its own")
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return [entry.name for entry in root.list(folder)]  # raises if the root is not mounted
    except OSError as cause:
        raise error_of("list", path, cause) from cause
