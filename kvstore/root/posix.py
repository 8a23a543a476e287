"""A root on a mounted file system: a local disk, NFS, or any distributed file system with POSIX names.

Bytes go with ``pwritev``/``preadv`` straight from and into the caller's arrays.  The one exception is a read that may
block: its bytes arrive in memory of ours first, because a system call that hangs on a dead mount cannot be taken back
and would write into the caller's array long after the caller has given up (``Borrowed``).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

import numpy as np

from kvstore.buffers import Borrowed, Pieces, byte_length, skip
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, PermissionDenied, Unavailable
from kvstore.format.places import FORMAT, QUARANTINE, Name
from kvstore.root.interface import Entry, LocalFiles, Seen, Space, Stat, Traits

IOV_MAX = os.sysconf("SC_IOV_MAX")
BOUNCE_BYTES = 1 << 20
"""One blocking read; small enough to stay in the processor's cache until it is copied on."""

MISSING_ERRORS = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ENOTDIR, errno.ELOOP})
FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
SHORT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
REFUSED_ERRORS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)

_scratch = threading.local()


class PosixRoot:
    """A folder. ``step`` is called at named points between system calls, so that a test can stop there.

    The points are stage.created, stage.written, stage.complete, publish.before, publish.linked, publish.done,
    replace.before, replace.done.

    ``direct``: native reads of what is not cached go around the page cache (O_DIRECT), where the file system can.
    """

    def __init__(self, path: str | Path, *, step: Callable[[str], None] | None = None, direct: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.url = f"file://{self.path}"
        self.traits = Traits(
            exclusive_publish=True,
            ordered_publish=True,
            touch=True,
            mapped=True,
            fenced=True,
            conditional_remove=False,
        )
        self._step = step or _no_step
        self._format = _content(f"{self.path}/{FORMAT}")
        # Memory has no device to wait for, and tmpfs does not know RWF_NOWAIT.
        self._never_blocks = file_system_type(self.path) in MEMORY_FILE_SYSTEMS
        self.local_files: LocalFiles | None = None
        if type(self) is PosixRoot:  # a subclass that does something else with files has to be asked for each
            self.local_files = LocalFiles(self.path, self._never_blocks, stages=step is None, direct=direct)

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        path = self._at(name)
        with _translated("write", path):
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
        with _translated("publish", path):
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

    def discard(self, staged: Name) -> None:
        self.remove(staged)

    def open(self, name: Name) -> PosixReader | None:
        path, fd = self._at(name), -1
        try:
            # O_NONBLOCK: something else than a file under a chunk's name must not stop us.
            # O_NOFOLLOW: nothing of ours is a link, and what one leads to is not ours.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            status = os.fstat(fd)
        except OSError as cause:
            if fd >= 0:
                os.close(fd)
            if cause.errno in MISSING_ERRORS:
                return None
            raise _error("open", path, cause) from cause
        if not S_ISREG(status.st_mode):
            os.close(fd)
            return None
        return PosixReader(fd, path, Stat(status.st_size, status.st_mtime_ns), self._never_blocks)

    def stat(self, name: Name) -> Stat | None:
        path = self._at(name)
        try:
            status = os.lstat(path)
        except OSError as cause:
            if cause.errno in MISSING_ERRORS:
                return None
            raise _error("look at", path, cause) from cause
        return Stat(status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else None

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        reader = self.open(name)
        if reader is None:
            return None
        with reader:
            prefix = bytearray(min(size_bytes, reader.stat.size_bytes))
            count = reader.read([memoryview(prefix)], 0, Borrowed()) if prefix else 0
        # Fewer bytes than there were: it was deleted under us, on a file system where that ends reading.
        return Seen(reader.stat, bytes(prefix), None) if count == len(prefix) else None

    def touch(self, name: Name, stamp_ns: int) -> bool:
        try:
            os.utime(self._at(name), ns=(stamp_ns, stamp_ns))
        except OSError as cause:
            # Renewal is advice to garbage collection; a read-only or foreign-owned root must not fail a read.
            if cause.errno in MISSING_ERRORS or cause.errno in REFUSED_ERRORS:
                return False
            raise _error("touch", self._at(name), cause) from cause
        return True

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        path = self._at(name)
        with _translated("move", path):
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

    def replace(self, staged: Name, name: Name, seen: Seen, aside: Name, *, durable: bool) -> bool:
        path, kept = self._at(name), self._at(aside)
        with _translated("replace", path):
            try:
                os.link(path, kept, follow_symlinks=False)
            except OSError as cause:
                if cause.errno in MISSING_ERRORS:
                    return False  # the folder of ``aside`` is there: the staged file lies in it
                raise
            # Looked at under the name that nobody else uses: another may have got the first one meanwhile.
            found = self.look(aside, len(seen.prefix))
            if found is None or (found.prefix, found.stat.size_bytes) != (seen.prefix, seen.stat.size_bytes):
                self.remove(aside)
                return False
            self._step("replace.before")
            os.rename(self._at(staged), path)
            self._step("replace.done")
            if durable:
                _sync_folder(os.path.dirname(path))
        return True

    def make_folder(self, name: Name) -> None:
        path = self._at(name)
        with _translated("make", path):
            self._make_folder(f"{path}/.")

    def remove(self, name: Name) -> bool:
        path = self._at(name)
        with _translated("remove", path):
            try:
                os.unlink(path)
            except OSError as cause:
                if cause.errno in MISSING_ERRORS:
                    return False
                raise
        return True

    def remove_if(self, name: Name, seen: Seen) -> bool:
        raise InvalidRequest(f"{self.url} removes no file conditionally: sweeps are fenced by folders there (rule F1)")

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        path = self._at(name)
        with _translated("remove", path):
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

    def list(self, folder: Name) -> Iterator[Entry]:
        path = self._at(folder)
        with _translated("list", path):
            if folder and os.path.islink(path):
                raise Unavailable(f"{path} is a symbolic link: the folders of a root must be its own")
            try:
                entries = os.scandir(path)
            except OSError as cause:
                # Not every error that means a missing file: what a mount loses for a moment is not an empty folder.
                if cause.errno in (errno.ENOENT, errno.ENOTDIR):
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
                        # Listed, and not to be looked at for the moment: it is there all the same.
                        yield Entry(entry.name, Stat(0, 0))
                        continue
                    yield Entry(entry.name, status and Stat(status.st_size, status.st_mtime_ns))

    def space(self) -> Space:
        with _translated("look at", self.path):
            status = os.statvfs(self.path)
        return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def close(self) -> None:
        """Nothing is kept open between calls."""

    def _create(self, path: str) -> int:
        """Opens a new file, making its folder the first time. O_EXCL: a name used twice would be truncated while it is
        the published inode (rule W2)."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._make_folder(path)
            return os.open(path, flags, 0o666)

    def _link(self, source: str, path: str) -> None:
        try:
            os.link(source, path)
        except FileNotFoundError:
            self._make_folder(path)
            os.link(source, path)

    def _move_obstacle(self, source: str, path: str) -> bool:
        """Where the name is taken by something that is no file (a folder, a dangling link), sets it aside and links."""
        try:
            if S_ISREG(os.lstat(path).st_mode):
                return False
            aside = f"{self.path}/{QUARANTINE}/{os.path.basename(path)}.{os.path.basename(os.path.dirname(source))}"
            self._make_folder(aside)
            os.rename(path, aside)
            os.link(source, path)
        except (FileNotFoundError, FileExistsError):
            return False  # somebody else was quicker; the next put looks again
        return True

    def _make_folder(self, path: str) -> None:
        """Makes the folder of a file, unless the root is not there any more.

        On the bare mount point this is where a write would begin to fill it, and whoever mounts again would lose what
        was acknowledged meanwhile.
        """
        self._check_mounted()
        folder = os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
        except FileExistsError:
            # Not for callers that ask whether the file is there.
            raise NotADirectoryError(errno.ENOTDIR, "what is there is no folder", folder) from None

    def _check_mounted(self) -> None:
        """Raises Unavailable where this is not the root that was opened: an unmounted one has none of our folders, and
        what is missing there says nothing (a fence that seems lifted is not)."""
        found = _content(f"{self.path}/{FORMAT}")
        if self._format is None:
            self._format = found
        elif found != self._format:
            raise Unavailable(f"{self.path} is not the root that was opened: is its file system still mounted?")

    def _at(self, name: Name) -> str:
        return f"{self.path}/{name}"


class PosixReader:
    """An open file of a PosixRoot."""

    __slots__ = ("_fd", "_never_blocks", "_path", "stat")

    def __init__(self, fd: int, path: str, stat: Stat, never_blocks: bool) -> None:
        self._fd = fd
        self._path = path
        self._never_blocks = never_blocks
        self.stat = stat

    def read(self, pieces: Pieces, offset: int, borrowed: Borrowed) -> int:
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
                raise _error("read", self._path, cause) from cause
        return done

    def _read_cached(self, pieces: Pieces, offset: int, borrowed: Borrowed) -> int | None:
        """Reads what needs no device, straight into ``pieces``; None where nothing is cached, 0 at the end."""
        if not (self._never_blocks or RWF_NOWAIT):
            return None
        with borrowed.writing():
            try:
                return os.preadv(
                    self._fd,
                    pieces[:IOV_MAX],
                    offset,
                    0 if self._never_blocks else RWF_NOWAIT,
                )
            except OSError as cause:
                # Not cached, or a file system without RWF_NOWAIT (NFS, FUSE): ask in a way that may block.
                if cause.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                    return None
                raise

    def _read_blocking(self, pieces: Pieces, offset: int, borrowed: Borrowed, wanted: int) -> int:
        """Reads up to BOUNCE_BYTES through memory of ours, and copies them on while they are in the cache."""
        with suppress(OSError):
            os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_WILLNEED)
        scratch = _scratch_buffer()
        borrowed.check()
        count = os.preadv(self._fd, [memoryview(scratch)[: min(wanted, BOUNCE_BYTES)]], offset)
        with borrowed.writing():
            start = 0
            for piece in pieces:
                size = min(len(piece), count - start)
                if not size:
                    continue
                # numpy releases the GIL for a copy of this size; slice assignment would not.
                np.copyto(
                    np.frombuffer(piece, np.uint8, size),
                    np.frombuffer(scratch, np.uint8, size, start),
                )
                start += size
        return count

    def map(self) -> memoryview | None:
        if not self.stat.size_bytes:
            return memoryview(b"")
        with _translated("map", self._path):
            try:
                # Never MAP_POPULATE: it reads the file inside this call, which holds the GIL, for as long as the
                # device takes.
                return memoryview(mmap.mmap(self._fd, self.stat.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
            except ValueError:
                return None  # the file became shorter than it was: somebody damaged it meanwhile
            except OSError as cause:
                if cause.errno in MISSING_ERRORS:
                    return None
                raise

    def fileno(self) -> int:
        """The file's descriptor, which stays this reader's."""
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


def _no_step(point: str) -> None:
    pass


def _content(path: str) -> bytes | None:
    """A small file's content; None where there is none."""
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


def _scratch_buffer() -> bytearray:
    """This thread's bounce buffer."""
    buffer: bytearray | None = getattr(_scratch, "buffer", None)
    if buffer is None:
        buffer = _scratch.buffer = bytearray(BOUNCE_BYTES)
    return buffer


def file_system_type(path: str) -> str:
    """The type of the file system that holds ``path``, as /proc/self/mountinfo names it; empty if unknown."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        return ""
    return ""


@contextmanager
def _translated(action: str, path: str) -> Iterator[None]:
    """The rim: what the kernel says becomes what a caller can act on."""
    try:
        yield
    except OSError as cause:
        raise _error(action, path, cause) from cause


def _error(action: str, path: str, cause: OSError) -> KVStoreError:
    said = f"could not {action} {path}: {cause.strerror or cause}"
    if cause.errno in FULL_ERRORS:
        return Overloaded(f"{said}; free space on the root (kvstore-gc, or a larger quota)")
    if cause.errno in SHORT_ERRORS:
        return Overloaded(f"{said}; this process or host is short of files or memory: raise its limits (ulimit -n)")
    if cause.errno in REFUSED_ERRORS:
        return PermissionDenied(f"{said}; check the mount options and the owner of the root")
    return Unavailable(f"{said}; check the mount (kvstore check-root)")
