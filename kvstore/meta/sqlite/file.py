"""The file with the metadata: made, opened, and recognised by the thread that owns it."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from urllib.parse import quote

from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unavailable
from kvstore.format.places import METADATA, METADATA_LIVENESS
from kvstore.meta.sqlite import process
from kvstore.meta.sqlite.making import locked, make_empty
from kvstore.meta.sqlite.store import Store, create

LOG_BYTES_MAX = 1 << 30
"""A process that was stopped while it read keeps SQLite from using its log again. The log must not fill the disk."""

SPARE_BYTES = 256 << 10
"""Room for a thousand keys: sessions, namespaces, pins and sweeps of a small store. It counts in no bound."""
SPARE_SHARE = 64
"""A disk has so many times that free, or the file gets none."""

SETTINGS = ("journal_mode = WAL", "cell_size_check = ON", "secure_delete = OFF", "journal_size_limit = 4194304")

Inode = tuple[int, int]


class MetadataFile:
    """The file in ``folder``. ``tables`` makes a Store of an open database. One thread."""

    def __init__(self, folder: str, tables: Callable[[sqlite3.Connection], Store]) -> None:
        self.path = os.path.join(folder, METADATA)
        self.openings = 0
        """Grows when the file was removed or replaced, and another was opened: then revisions begin anew."""
        self._tables = tables
        self._database: sqlite3.Connection | None = None
        self._store: Store | None = None
        self._inode: Inode | None = None
        self._beside: tuple[Inode | None, ...] = ()
        """The log, and the memory that says what is in it: without the same two, processes do not see each other."""

    def opened(self, timeout_s: float) -> tuple[sqlite3.Connection, Store]:
        """Returns the open file, which waits for locks of other processes for ``timeout_s``. Makes it if there is none.

        Opens it again if it, or a file that SQLite keeps beside it, was removed or replaced: nobody else looks at the
        old one. Raises Unavailable, PermissionDenied, and the errors of SQLite and the system.
        """
        if self._database is not None and self._inode != _inode(self.path):
            self.close()
        if self._database is not None and self._beside != _beside(self.path):
            self.close()
            self._inode = None  # what was in the log may be lost, so revisions may begin anew
        if self._database is None or self._store is None:
            self._database, self._store = self._open(timeout_s)
        self._database.execute(f"PRAGMA busy_timeout = {max(1, int(1000 * timeout_s))}")
        self._check_log()
        return self._database, self._store

    def shortened(self, timeout_s: float) -> bool:
        """Writes what is in the log to the file and cuts the log to nothing, on a full disk; True if that made room.

        The log has up to 4 MiB where the disk became full, and the file has spare pages for what is in it.
        """
        try:
            database, _ = self.opened(timeout_s)
            size_bytes = os.stat(f"{self.path}-wal").st_size
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return os.stat(f"{self.path}-wal").st_size < size_bytes
        except (KVStoreError, sqlite3.Error, OSError):
            return False

    def close(self) -> None:
        """Closes it. Idempotent."""
        database, self._database, self._store = self._database, None, None
        if database is not None:
            try:
                database.close()
            except sqlite3.Error:
                pass  # of no use either way

    def _open(self, timeout_s: float) -> tuple[sqlite3.Connection, Store]:
        if process.is_inherited(self.path):
            raise InvalidRequest(
                f"this process was forked while its parent was busy with {self.path}, so it gets no locks there: start "
                "it by spawn"
            )
        inode = _made(self.path, timeout_s)
        database = sqlite3.connect(_uri(self.path), uri=True, timeout=timeout_s, isolation_level=None)
        try:
            for setting in SETTINGS:
                database.execute(f"PRAGMA {setting}")
            database.execute("PRAGMA user_version")
            # SQLite has opened the log now, by its name. If the file was replaced meanwhile, that is the log of the
            # next file, and what we wrote would go there.
            self._check_place(inode)
            store = self._tables(database)
            beside = _beside(self.path)
            self._check_place(inode)
            if None in beside:
                raise self._replaced()
        except BaseException:
            database.close()
            raise
        if inode != self._inode:
            self._inode, self.openings = inode, self.openings + 1
        self._beside = beside
        return database, store

    def _check_place(self, inode: Inode) -> None:
        if inode != _inode(self.path):
            raise self._replaced()

    def _replaced(self) -> Unavailable:
        return Unavailable(f"metadata in {self.path}: it was replaced while it was opened: try again")

    def _check_log(self) -> None:
        try:
            size_bytes = os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return
        if size_bytes > LOG_BYTES_MAX:
            raise Unavailable(
                f"{self.path}-wal has {size_bytes} bytes: a process that was stopped while it read keeps it from being "
                "used again: let it go on, or end it"
            )


def _inode(path: str) -> Inode | None:
    """Returns the identity of the file at ``path``; None if there is none.

    By its name: closing a descriptor of the file would drop the locks that SQLite has on it.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _beside(path: str) -> tuple[Inode | None, ...]:
    return _inode(f"{path}-wal"), _inode(f"{path}-shm")


def _made(path: str, timeout_s: float) -> Inode:
    """Makes the file unless it is there; returns its identity. Raises PermissionDenied, Unavailable, OSError."""
    if not os.path.lexists(path):
        try:
            _make(path, timeout_s)
        except OSError as cause:
            if cause.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise PermissionDenied(f"metadata in {path}: not allowed to make that file: {_ASK}") from cause
    inode = _inode(path)
    if inode is None:
        raise Unavailable(f"metadata in {path}: that is not a file (remove it then), or it was removed at this moment")
    if not os.access(path, os.R_OK | os.W_OK) or not os.access(os.path.dirname(path), os.W_OK):
        raise PermissionDenied(f"metadata in {path}: not allowed to write to it: {_ASK}")
    return inode


def _make(path: str, timeout_s: float) -> None:
    """Makes the file under another name, and gives it its own when it is whole.

    Nobody may open an empty one: SQLite deletes the log that it finds beside that, which may be another file's by then.
    Nor may the log of a file that was removed stay: SQLite would write what is in it to the new one.
    """
    own = f"{path}.{os.urandom(8).hex()}.new"
    try:
        make_empty(own)
        with closing(sqlite3.connect(_uri(own), uri=True, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            create(database, _spare_bytes(own))
        with locked(os.path.join(os.path.dirname(path), METADATA_LIVENESS), timeout_s):
            if not os.path.lexists(path):  # otherwise another process was faster, and the log is its own
                _unlink(path, ("-wal", "-shm"))
                os.link(own, path)
    finally:
        _unlink(own, ("", "-journal", "-wal", "-shm"))


def _unlink(path: str, endings: Sequence[str]) -> None:
    for ending in endings:
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{ending}")


def _spare_bytes(path: str) -> int:
    """Returns how many bytes the file is to have for later; none on a small or full disk."""
    space = os.statvfs(path)
    return SPARE_BYTES if space.f_bavail * space.f_frsize >= SPARE_SHARE * SPARE_BYTES else 0


def _uri(path: str) -> str:
    """Returns the name by which SQLite opens a file, and does not make it: it would choose another mode."""
    return f"file:{quote(path)}?mode=rw"


_ASK = "check the mount options and the owner of the root"
