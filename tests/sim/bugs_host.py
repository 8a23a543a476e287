"""Bugs of the metadata file: leases, transactions, watches, and a file that is removed or replaced."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from kvstore.meta.sqlite.client import SqliteMeta
from kvstore.meta.sqlite.file import MetadataFile
from kvstore.meta.sqlite.liveness import Liveness
from kvstore.meta.sqlite.store import Store
from kvstore.meta.sqlite.watch import SqliteWatch

from kvstore.meta.interface import LeaseId
from kvstore.sources import Clock
from tests.sim.planting import bug


@bug("host")
def lease_keeps_keys() -> Iterator[None]:
    """A lease that ends leaves what was written under it."""

    def end_leases(self: Store, which: str, value: object) -> None:
        for (lease,) in self._database.execute(which, (value,)).fetchall():
            self._database.execute("DELETE FROM leases WHERE id = ?", (lease,))

    with patch.object(Store, "_end_leases", end_leases):
        yield


@bug("host")
def lease_never_ends() -> Iterator[None]:
    """Nobody looks which leases are due."""
    with patch.object(Store, "_end_due", lambda self: None):
        yield


@bug("host")
def transaction_compares_nothing() -> Iterator[None]:
    """A transaction is done whatever it compares."""
    with patch.object(Store, "_holds", lambda self, compare: True):
        yield


@bug("host")
def transaction_compares_before() -> Iterator[None]:
    """A transaction compares before it has the lock, and writes when it has it."""

    def txn(self: Store, compares: Any, operations: Any) -> Any:
        found = [self._holds(compare) for compare in compares]
        with patch.object(Store, "_holds", lambda self, compare: all(found)):
            return real(self, compares, operations)

    real = Store.txn
    with patch.object(Store, "txn", txn):
        yield


@bug("host")
def half_a_transaction() -> Iterator[None]:
    """Each statement of a transaction is seen at once, and stays if the process dies."""

    @contextmanager
    def writing(self: Store, *, synced: bool) -> Iterator[None]:
        yield

    with patch.object(Store, "_writing", writing):
        yield


@bug("host")
def watch_misses_event() -> Iterator[None]:
    """A watch goes on behind the newest revision, read after the events: what came between is never told."""

    def events(self: Store, prefix: str, from_revision: int) -> Any:
        found, _ = real(self, prefix, from_revision)
        return found, max(from_revision, self.revision() + 1)

    real = Store.events
    with patch.object(Store, "events", events):
        yield


@bug("host")
def list_is_of_two_moments() -> Iterator[None]:
    """A list says a revision that is newer than its keys, so a watch from there misses a change."""

    @contextmanager
    def reading(self: Store) -> Iterator[None]:
        yield

    with patch.object(Store, "_reading", reading):
        yield


@bug("host")
def watch_outlives_its_file() -> Iterator[None]:
    """A watch goes on in the next file, whose revisions are others."""

    def look(self: SqliteWatch, timeout_s: float) -> Any:
        self._openings = self._connection.openings
        return real(self, timeout_s)

    real = SqliteWatch._look
    with patch.object(SqliteWatch, "_look", look):
        yield


@bug("host")
def removed_file_stays_open() -> Iterator[None]:
    """A process goes on in a file that others do not find any more."""

    def opened(self: MetadataFile, timeout_s: float) -> Any:
        if self._database is None or self._store is None:
            return real(self, timeout_s)
        return self._database, self._store

    real = MetadataFile.opened
    with patch.object(MetadataFile, "opened", opened):
        yield


@bug("host_older")
def lease_ids_again() -> Iterator[None]:
    """A lease in the next file has the number of one in the file before it."""

    def grant(self: SqliteMeta, ttl_s: int, timeout_s: float | None = None, *, while_open: bool = False) -> LeaseId:
        def within(store: Store) -> LeaseId:
            with store._writing(synced=False):
                (highest,) = store._database.execute("SELECT coalesce(max(id), 0) FROM leases").fetchone()
                ends_s = store._clock.monotonic_s() + ttl_s
                store._database.execute("INSERT INTO leases VALUES (?, ?, ?, 0, 0)", (highest + 1, ttl_s, ends_s))
            return LeaseId(highest + 1)

        return self._call("grant", within, timeout_s)

    with patch.object(SqliteMeta, "grant", grant):
        yield


@bug("host")
def others_are_gone() -> Iterator[None]:
    """The leases of a process end when another one looks, though it lives."""
    with patch.object(Liveness, "is_gone", lambda self, owner: owner.byte != self._byte):
        yield


@bug("host")
def boot_is_forgotten() -> Iterator[None]:
    """Leases of before the boot go on."""

    def made(self: Store, database: sqlite3.Connection, clock: Clock, boot: str, liveness: Liveness) -> None:
        real(self, database, clock, "one", liveness)

    real = Store.__init__
    with patch.object(Store, "__init__", made):
        yield
