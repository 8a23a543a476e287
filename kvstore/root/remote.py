"""The few calls that ObjectRoot makes of fsspec, and the translation of their errors.

Separate from ``objects.py`` because file systems differ in these calls (``s3.py`` has those of S3), while the rules of
the store do not. fsspec caches listings and instances; both caches are turned off. A cached listing would miss another
host's new chunk, and would still show a deleted one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, PermissionDenied, StoreFull, Unavailable
from kvstore.root.interface import Entry, Seen, Stat

GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""The errors for a file that is not there."""

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_BUSY_ERRNOS = frozenset({errno.EBUSY, errno.EMFILE, errno.ENFILE})
_REFUSED_ERRNOS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_GONE_ERRNOS = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTCONN})
_MTIME_KEYS = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class Remote:
    """Any fsspec file system. Paths are its own, without protocol; sizes in bytes. Raises fsspec's errors."""

    def __init__(self, fs: Any, *, conditional: bool = False) -> None:
        self.fs = fs
        self.conditional = conditional
        """True if the server decides about ``create``. Elsewhere fsspec looks first and writes then."""

    def stat(self, path: str) -> Stat | None:
        """Returns the stat of one file; None if there is none, or only a folder."""
        try:
            found = self.fs.info(path)
        except OSError as cause:
            if is_gone(cause):
                return None
            raise
        return None if found.get("type") == "directory" else stat_of(found)

    def read(self, path: str, start: int, end: int) -> bytes:
        """Returns the bytes from ``start`` up to ``end``."""
        content: bytes = self.fs.cat_file(path, start=start, end=end)
        return content

    def look(self, path: str, size_bytes: int) -> Seen | None:
        """Returns stat and first bytes of a file; None if there is none. Two requests, so without a tag."""
        stat = self.stat(path)
        if stat is None:
            return None
        try:
            return Seen(stat, self.read(path, 0, size_bytes)[:size_bytes] if stat.size_bytes else b"", None)
        except OSError as cause:
            if is_gone(cause):
                return None
            raise

    def create(self, path: str, content: bytes) -> None:
        """Writes a file that must not exist; raises FileExistsError if the file system can tell that it does."""
        self._write(path, content, "create")

    def write(self, path: str, content: bytes) -> None:
        """Writes a file, replacing an existing one."""
        self._write(path, content, None)

    def copy(self, source: str, path: str) -> None:
        """Copies a file on the server."""
        try:
            self.fs.cp_file(source, path)
        except FileNotFoundError:
            if self.stat(source) is None:
                raise
            self.make_folder(path)
            self.fs.cp_file(source, path)

    def delete(self, path: str) -> None:
        """Deletes a file."""
        self.fs.rm_file(path)

    def delete_if(self, path: str, tag: str) -> bool:
        """Deletes the version ``tag`` of a file; False if it has another version by now. True if it is gone."""
        raise NotImplementedError("fsspec has no conditional delete")

    def pages(self, folder: str) -> Iterator[list[Entry]]:
        """Yields the entries of a folder, as many at a time as the file system gives; none if there is no folder."""
        self.fs.invalidate_cache(folder)
        try:
            found = self.fs.ls(folder, detail=True, refresh=True)
        except GONE:
            return
        yield [entry_of(item) for item in found if item["name"].strip("/") != folder.strip("/")]

    def remove_folder(self, folder: str) -> bool:
        """Deletes an empty folder, if the file system has folders; False if it is not empty."""
        if any(self.pages(folder)):
            return False
        try:
            self.fs.rmdir(folder)
        except GONE:
            return True
        except (OSError, NotImplementedError):
            return not any(self.pages(folder))
        return True

    def make_folder(self, path: str) -> None:
        """Makes the folder of ``path``, for file systems that need one (SFTP, HDFS)."""
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def close(self) -> None:
        """Does nothing: the garbage collector closes whatever fsspec's file systems hold."""

    def _write(self, path: str, content: bytes, mode: str | None) -> None:
        options = {} if mode is None else {"mode": mode}
        try:
            self.fs.pipe_file(path, content, **options)
        except FileNotFoundError:
            self.make_folder(path)
            self.fs.pipe_file(path, content, **options)


def stat_of(found: Mapping[str, Any]) -> Stat:
    """Returns size and mtime from fsspec's description of a file; mtime 0 if it has none."""
    return Stat(int(found.get("size") or 0), _mtime_ns(found))


def entry_of(found: Mapping[str, Any]) -> Entry:
    """Returns a folder's entry from fsspec's description."""
    name = str(found["name"]).rstrip("/").rpartition("/")[2]
    return Entry(name, None if found.get("type") == "directory" else stat_of(found))


def _mtime_ns(found: Mapping[str, Any]) -> int:
    for key in _MTIME_KEYS:
        value = found.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = value.timestamp()
        if isinstance(value, int | float):
            return int(value * 1_000_000) * 1_000
    return 0


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Translates at the rim: errors of a foreign library become errors that a caller can act on."""
    try:
        yield
    except KVStoreError:
        raise
    except Exception as cause:  # fsspec's implementations raise errors of a dozen libraries
        raise error_of(action, path, cause) from cause


def is_gone(cause: OSError) -> bool:
    """True if an error means that the file does not exist (any more)."""
    return isinstance(cause, GONE) or cause.errno in _GONE_ERRNOS


def error_of(action: str, path: str, cause: Exception) -> KVStoreError:
    """Returns the caller's error for one of a foreign library; ``action`` is a verb, such as "read"."""
    said = f"could not {action} {path}: {type(cause).__name__}: {cause}"
    code = cause.errno if isinstance(cause, OSError) else None
    if code in _FULL_ERRNOS:
        return StoreFull(f"{said}; the store is full: free space (kvstore-gc)")
    if code in _BUSY_ERRNOS:
        return Overloaded(f"{said}; the store is busy: back off")
    if isinstance(cause, PermissionError) or code in _REFUSED_ERRNOS or "Credential" in type(cause).__name__:
        return PermissionDenied(f"{said}; check the credentials and the policy of the root")
    if isinstance(cause, NotImplementedError):
        return InvalidRequest(f"{said}; this file system cannot hold a root")
    return Unavailable(f"{said}; check the address of the store and the network")
