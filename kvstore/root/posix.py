"""A root on a mounted file system: a local disk, NFS, or any distributed file system with POSIX names.

``pwritev`` writes bytes straight from the caller's arrays; ``posix_reader.py`` reads them back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG

from kvstore.buffers import Pieces, skip
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.places import FORMAT, QUARANTINE, Name
from kvstore.root.absence import Absence, remembers_absence
from kvstore.root.interface import Entry, LocalFiles, Seen, Space, Stat, Traits
from kvstore.root.mounts import MEMORY_FILE_SYSTEMS, mount_of, sync_file_system
from kvstore.root.posix_errors import MISSING_ERRORS, REFUSED_ERRORS, error_of, translated
from kvstore.root.posix_reader import IOV_MAX, PosixReader

FILE_MODE, FOLDER_MODE = 0o660, 0o770
"""KV tensors tell what was asked, so nobody else may read them. The umask takes away more: 022 leaves the group reading
only. Native code has the same two."""


class PosixRoot:
    """A folder. ``step`` is called at named points between system calls, so that a test can stop there.

    The points are stage.created, stage.written, stage.complete, publish.before, publish.linked, publish.done.

    ``direct``: native reads of uncached data go around the page cache (O_DIRECT), if the file system can.
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
        mount = mount_of(self.path)
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

    def discard(self, staged: Name) -> None:
        self.remove(staged)

    def open(self, name: Name) -> PosixReader | None:
        path, fd = self._at(name), -1
        try:
            # O_NONBLOCK: a chunk's name that is not a file must not block us. O_NOFOLLOW: none of our files is a link,
            # so a link leads to something foreign.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            status = os.fstat(fd)
        except OSError as cause:
            if fd >= 0:
                os.close(fd)
            if cause.errno in MISSING_ERRORS:
                return self.open(name) if self._absence is not None and self._absence.may_be_old(path) else None
            raise error_of("open", path, cause) from cause
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
                return self.stat(name) if self._absence is not None and self._absence.may_be_old(path) else None
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

    def remove_if(self, name: Name, seen: Seen) -> bool:
        raise InvalidRequest(
            f"{self.url} cannot remove files conditionally: sweeps are fenced by folders there (rule F1)"
        )

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

    def list(self, folder: Name) -> Iterator[Entry]:
        path = self._at(folder)
        with translated("list", path):
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
                        # Listed, but the look fails for the moment: it is there all the same.
                        yield Entry(entry.name, Stat(0, 0))
                        continue
                    yield Entry(entry.name, status and Stat(status.st_size, status.st_mtime_ns))

    def sync(self) -> None:
        with translated("sync", self.path):
            sync_file_system(self.path)

    def space(self) -> Space:
        with translated("look at", self.path):
            status = os.statvfs(self.path)
        return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

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

        Otherwise a write would begin to fill the bare mount point. A later mount would hide those files, and lose what
        was acknowledged meanwhile.
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
        """Raises Unavailable if a folder of the root, or one above it, is a link, which leads to somebody else's."""
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


def _no_step(point: str) -> None:
    pass


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
