"""The meaning of SQLite's errors, and what to do about each."""

from __future__ import annotations

import os
import sqlite3

from kvstore.errors import KVStoreError, PermissionDenied, Unavailable

PAGE_BYTES = 4096
"""SQLite's default."""


class DamagedMetadata(Unavailable):
    """The file has something in it that nobody wrote."""


_BUSY = "another process has been writing to it for too long (is one stopped?): the call may be repeated"
_DAMAGED = (
    "it is damaged. Chunks are served, but nothing is protected and nothing collected, until `kvstore fsck ROOT "
    "--adopt` has put a new file in its place"
)
_REFUSED = "not allowed to write to it: check the mount options, and the owner of the root"

_ADVICE = {
    0: _DAMAGED,  # found by us: a row that nobody wrote
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_FULL: "no space is left on the disk: free some",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_SCHEMA: _DAMAGED,
    sqlite3.SQLITE_ERROR: _DAMAGED,  # such as a table that is not there: our statements are right
    # The log was removed under a process that stands still: less is there than processes have told each other. A disk
    # that fails has other codes.
    sqlite3.SQLITE_IOERR_SHORT_READ: _DAMAGED,
}
_REFUSALS = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})
_WAITS = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_HARMLESS = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL})


def fault_of(error: sqlite3.Error, path: str) -> KVStoreError:
    """Returns the caller's error for one of SQLite's."""
    code = _code(error)
    if code in _WAITS and _is_cut(path):
        # SQLite waits for others to mend what they cannot.
        return DamagedMetadata(f"metadata in {path}: the file was cut: {_DAMAGED}")
    if code in _REFUSALS:
        return PermissionDenied(f"metadata in {path}: {error}: {_REFUSED}")
    kind = DamagedMetadata if is_damage(error) else Unavailable
    return kind(f"metadata in {path}: {error}: {_advice(error) or 'is the disk full or failing?'}")


def is_damage(error: sqlite3.Error) -> bool:
    """True if the file has something in it that nobody wrote."""
    return _advice(error) is _DAMAGED


def _advice(error: sqlite3.Error) -> str | None:
    return _ADVICE.get(getattr(error, "sqlite_errorcode", 0)) or _ADVICE.get(_code(error))


def _is_cut(path: str) -> bool:
    """True if the file has a size that SQLite never gives it. Not opened: closing it would drop SQLite's locks."""
    try:
        size_bytes = os.stat(path).st_size
    except OSError:
        return False
    return size_bytes == 0 or size_bytes % PAGE_BYTES != 0


def is_full(error: sqlite3.Error) -> bool:
    """True if the disk had no room, and nothing was done."""
    return _code(error) == sqlite3.SQLITE_FULL


def keeps_connection(error: sqlite3.Error) -> bool:
    """True if the connection can be used again after this error."""
    return _code(error) in _HARMLESS


def _code(error: sqlite3.Error) -> int:
    """Returns the primary code: extended ones have details in the upper bytes."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
