"""The tables: keys, leases and a history that watches read, with etcd's semantics.

One thread calls; each call is one transaction of SQLite, which all processes see at once or not at all.

Durability: what is written under a lease need not survive a crash of the host, because its lease does not. Such commits
are not synced. All others are (``synchronous=FULL``), together with those before them: the log is one file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from kvstore.meta.interface import (
    NO_LEASE,
    Absent,
    Compare,
    Delete,
    Event,
    KeyValue,
    LeaseGone,
    LeaseId,
    ModifiedAt,
    Put,
    Snapshot,
    TxnResult,
    ValueIs,
    WatchLost,
)
from kvstore.meta.sqlite.liveness import NOBODY, Liveness, Owner
from kvstore.sources import Clock

VERSION = 2
HISTORY_BYTES_MAX = 16 << 20
"""A watch that is further behind than this many bytes of changes is lost."""
EVENT_BYTES = 128
"""What an event counts beside its key and value, so that the number of events is bounded too."""

_TABLES = f"""
CREATE TABLE state (
    boot TEXT NOT NULL, revision INTEGER NOT NULL, compacted INTEGER NOT NULL, history_bytes INTEGER NOT NULL
);
INSERT INTO state VALUES ('', 1, 0, 0);
CREATE TABLE keys (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, created INTEGER NOT NULL, modified INTEGER NOT NULL,
    lease INTEGER NOT NULL
);
CREATE INDEX keys_of_lease ON keys (lease) WHERE lease != 0;
-- Owner 0: the lease outlives its client.
CREATE TABLE leases (
    id INTEGER PRIMARY KEY, ttl_s INTEGER NOT NULL, ends_s REAL NOT NULL, owner INTEGER NOT NULL, inode INTEGER NOT NULL
);
CREATE INDEX leases_by_end ON leases (ends_s);
CREATE INDEX leases_by_owner ON leases (owner, inode) WHERE owner != 0;
-- An event without a value is a deletion.
CREATE TABLE history (
    revision INTEGER NOT NULL, key BLOB NOT NULL, value BLOB, created INTEGER NOT NULL, lease INTEGER NOT NULL
);
CREATE INDEX history_by_revision ON history (revision);
PRAGMA user_version = {VERSION}
"""
_SIZE = f"{EVENT_BYTES} + length(key) + ifnull(length(value), 0)"


def create(database: sqlite3.Connection, spare_bytes: int = 0) -> None:
    """Makes the tables in an empty database that nobody else has open, and ``spare_bytes`` of free pages for more.

    With those the log can be written to the file on a disk that is full since.
    """
    for statement in _TABLES.split(";"):
        database.execute(statement)
    if spare_bytes:
        # Each by itself: what is dropped in the transaction that made it is never written.
        for statement in (f"CREATE TABLE spare AS SELECT zeroblob({spare_bytes}) AS bytes", "DROP TABLE spare"):
            database.execute(statement)


class Store:
    """The metadata in one open database. ``boot`` names the boot of this host: leases of others have ended."""

    def __init__(self, database: sqlite3.Connection, clock: Clock, boot: str, liveness: Liveness) -> None:
        """Ends the leases of other boots. Raises DatabaseError for tables of another version, as for damage."""
        self._database = database
        self._clock = clock
        self._liveness = liveness
        if self._version != VERSION:
            raise sqlite3.DatabaseError(f"it is of version {self._version}, and this kvstore reads {VERSION}")
        if self._number("SELECT boot = ? FROM state", boot) == 0:
            with self._writing(synced=True):
                self._end_leases("SELECT id FROM leases WHERE (SELECT boot != ? FROM state)", boot)
                database.execute("UPDATE state SET boot = ?", (boot,))

    def get(self, key: str) -> KeyValue | None:
        """Returns the key as it is now."""
        self._end_due()
        return self._find(key)

    def list(self, prefix: str) -> Snapshot:
        """Returns all keys under ``prefix`` as they are now."""
        self._end_due()
        with self._reading():
            rows = self._database.execute(
                "SELECT key, value, created, modified, lease FROM keys WHERE key >= ? AND key < ? ORDER BY key",
                _range(prefix),
            )
            return Snapshot(tuple(_key_value(*row) for row in rows), self._revision)

    def count(self, prefix: str) -> int:
        """Returns the number of keys under ``prefix`` now."""
        self._end_due()
        return self._number("SELECT count(*) FROM keys WHERE key >= ? AND key < ?", *_range(prefix))

    def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """Applies ``operations`` at one new revision if all ``compares`` hold. Raises LeaseGone."""
        leased = all(isinstance(operation, Put) and operation.lease for operation in operations)
        with self._writing(synced=not leased):
            self._end_due()
            if not all(self._holds(compare) for compare in compares):
                return TxnResult(False, self._revision)
            for lease in {operation.lease for operation in operations if isinstance(operation, Put)} - {NO_LEASE}:
                if not self._number("SELECT count(*) FROM leases WHERE id = ?", lease):
                    raise LeaseGone(f"lease {lease:x} does not exist: nothing was written")
            self._apply(operations)
            return TxnResult(True, self._revision)

    def delete(self, key: str) -> bool:
        """Deletes one key; True if it was there."""
        with self._writing(synced=True):
            self._end_due()
            return self._apply([Delete(key)])

    def grant(self, lease: LeaseId, ttl_s: int, *, while_open: bool) -> None:
        """Makes a lease that ends ``ttl_s`` from now; ``while_open``: and with its client."""
        owner = self._liveness.owner() if while_open else NOBODY
        with self._writing(synced=False):
            ends_s = self._clock.monotonic_s() + ttl_s
            self._database.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", (lease, ttl_s, ends_s, *owner))

    def keep_alive(self, lease: LeaseId) -> bool:
        """Puts the lease's end off to its ttl from now; False if it has ended."""
        with self._writing(synced=False):
            self._end_due()
            now_s = self._clock.monotonic_s()
            renewed = self._database.execute("UPDATE leases SET ends_s = ? + ttl_s WHERE id = ?", (now_s, lease))
            return renewed.rowcount > 0

    def revoke(self, lease: LeaseId) -> None:
        """Ends the lease and deletes its keys at one revision."""
        with self._writing(synced=False):
            self._end_leases("SELECT id FROM leases WHERE id = ?", lease)

    def events(self, prefix: str, from_revision: int) -> tuple[tuple[Event, ...], int]:
        """Returns the events under ``prefix`` from ``from_revision`` on, and the revision to go on from.

        Raises WatchLost if history no longer reaches back that far.
        """
        self._end_due()
        with self._reading():
            compacted, revision = self._number("SELECT compacted FROM state"), self._revision
            if from_revision < compacted:
                raise WatchLost(f"revision {from_revision} is compacted (up to {compacted}): read afresh")
            rows = self._database.execute(
                "SELECT revision, key, value, created, lease FROM history"
                " WHERE revision >= ? AND key >= ? AND key < ? ORDER BY revision, rowid",
                (from_revision, *_range(prefix)),
            )
            return tuple(_event(*row) for row in rows), max(from_revision, revision + 1)

    def revision(self) -> int:
        """Returns the newest revision, once the leases that are due have ended."""
        self._end_due()
        return self._revision

    def check(self) -> None:
        """Reads all there is. Raises DatabaseError for what nobody wrote."""
        self.list("")
        self.events("", self._number("SELECT compacted FROM state"))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """All reads within see one state."""
        self._database.execute("BEGIN")
        try:
            yield
        finally:
            self._database.rollback()

    @contextmanager
    def _writing(self, *, synced: bool) -> Iterator[None]:
        self._database.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        # The lock at once: a transaction that reads first could not write once another process has written.
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        finally:
            if self._database.in_transaction:
                self._database.rollback()

    @property
    def _version(self) -> int:
        return self._number("PRAGMA user_version")

    @property
    def _revision(self) -> int:
        return self._number("SELECT revision FROM state")

    def _number(self, statement: str, *values: object) -> int:
        row = self._database.execute(statement, values).fetchone()
        if row is None or not isinstance(row[0], int):
            raise sqlite3.DatabaseError(f"{statement} found nothing")
        return row[0]

    def _find(self, key: str) -> KeyValue | None:
        row = self._database.execute(
            "SELECT key, value, created, modified, lease FROM keys WHERE key = ?", (key.encode(),)
        ).fetchone()
        return None if row is None else _key_value(*row)

    def _holds(self, compare: Compare) -> bool:
        found = self._find(compare.key)
        match compare:
            case Absent():
                return found is None
            case ModifiedAt():
                return found is not None and found.mod_revision == compare.mod_revision
            case ValueIs():
                return found is not None and found.value == compare.value

    def _end_due(self) -> None:
        """Ends the leases whose time is over, or whose client is gone; writes only if there are such."""
        now_s = self._clock.monotonic_s()
        owners = self._database.execute("SELECT DISTINCT owner, inode FROM leases WHERE owner != 0").fetchall()
        gone = [owner for owner in owners if self._liveness.is_gone(Owner(*owner))]
        if not gone and not self._number("SELECT count(*) FROM leases WHERE ends_s <= ?", now_s):
            return
        with nullcontext() if self._database.in_transaction else self._writing(synced=False):
            self._end_leases("SELECT id FROM leases WHERE ends_s <= ?", now_s)
            for owner in gone:
                self._end_leases("SELECT id FROM leases WHERE owner != 0 AND owner = ? AND inode = ?", *owner)

    def _end_leases(self, which: str, *values: object) -> None:
        """Ends the leases that a statement selects, each at a revision of its own."""
        for (lease,) in self._database.execute(which, values).fetchall():
            keys = self._database.execute("SELECT key FROM keys WHERE lease = ? AND lease != 0 ORDER BY key", (lease,))
            self._apply([Delete(_text(key)) for (key,) in keys.fetchall()])
            self._database.execute("DELETE FROM leases WHERE id = ?", (lease,))

    def _apply(self, operations: Sequence[Put | Delete]) -> bool:
        """Makes the changes at one new revision; False if there was nothing to change."""
        revision = self._revision + 1
        size_bytes = sum(self._change(operation, revision) for operation in operations)
        if not size_bytes:
            return False
        self._database.execute(
            "UPDATE state SET revision = ?, history_bytes = history_bytes + ?", (revision, size_bytes)
        )
        self._trim(revision)
        return True

    def _change(self, operation: Put | Delete, revision: int) -> int:
        """Makes one change; returns the bytes that it takes in the history, 0 if there was nothing to change."""
        key, before = operation.key.encode(), self._find(operation.key)
        if isinstance(operation, Delete):
            if before is None:
                return 0
            value, created, lease = None, 0, NO_LEASE
            self._database.execute("DELETE FROM keys WHERE key = ?", (key,))
        else:
            value, lease = bytes(operation.value), operation.lease
            created = before.create_revision if before else revision
            row = (key, value, created, revision, lease)
            self._database.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?)", row)
        self._database.execute("INSERT INTO history VALUES (?, ?, ?, ?, ?)", (revision, key, value, created, lease))
        return EVENT_BYTES + len(key) + len(value or b"")

    def _trim(self, newest: int) -> None:
        """Keeps the history within its limit, but always the newest revision."""
        surplus_bytes = self._number("SELECT history_bytes FROM state") - HISTORY_BYTES_MAX
        if surplus_bytes <= 0:
            return
        surplus_bytes += HISTORY_BYTES_MAX // 4  # more at once, and then not for a while
        sizes = self._database.execute(f"SELECT revision, {_SIZE} FROM history ORDER BY revision")
        cut = 0
        for revision, size_bytes in sizes:
            if surplus_bytes <= 0 or revision == newest:
                break
            surplus_bytes -= size_bytes
            cut = revision + 1
        sizes.close()
        self._compact(cut)

    def _compact(self, revision: int) -> None:
        """Forgets the history before ``revision``: watches from before are lost."""
        cut = min(revision, self._revision)
        freed_bytes = self._number(f"SELECT coalesce(sum({_SIZE}), 0) FROM history WHERE revision < ?", cut)
        self._database.execute("DELETE FROM history WHERE revision < ?", (cut,))
        self._database.execute(
            "UPDATE state SET compacted = max(compacted, ?), history_bytes = history_bytes - ?", (cut, freed_bytes)
        )


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Returns the first key under ``prefix``, and the first key behind all of them."""
    low = prefix.encode()
    # No byte of UTF-8 is 0xFF, so the last one can be counted up.
    return low, low[:-1] + bytes([low[-1] + 1]) if low else b"\xff"


def _key_value(*row: object) -> KeyValue:
    """Returns a row of ``keys``. Raises DatabaseError for what nobody wrote: the file is damaged."""
    match row:
        case (bytes(key), bytes(value), int(created), int(modified), int(lease)):
            return KeyValue(_text(key), value, created, modified, LeaseId(lease))
    raise sqlite3.DatabaseError("a row cannot be read")


def _event(revision: int, key: bytes, value: bytes | None, created: int, lease: int) -> Event:
    if value is None:
        return Event(_text(key), None, revision)
    kv = _key_value(key, value, created, revision, lease)
    return Event(kv.key, kv, revision)


def _text(key: bytes) -> str:
    try:
        return bytes.decode(key)
    except (TypeError, UnicodeDecodeError) as cause:
        raise sqlite3.DatabaseError("a key cannot be read") from cause
