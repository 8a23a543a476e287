"""The metadata file of a run: ``kvstore/meta/sqlite`` as it is, on a real file, in simulated processes.

Real: SQLite with its locks, its log and its rollback, every statement, the inodes and names of the files, and all code
of ``kvstore/meta/sqlite``. Simulated: time, threads, which connections are of one process, and waiting for a lock of
another process. Before each statement others may run, and the process may stand still or die.

A process that dies here lets go of its locks, and loses its transaction, as the system sees to it after SIGKILL; its
connection stays open until the run ends, so that nobody tidies up after it. Not shown here, because all processes of a
run are one process of the system: a kill within a statement, recovery of the log after the last process died, and the
removal of the log or of the shared memory alone. ``tests/chaos`` and ``tests/meta/test_meta_sqlite.py`` have these.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch
from urllib.parse import unquote

from kvstore.meta.sqlite import client, connection, file, mending, process
from kvstore.meta.sqlite.client import SqliteMeta
from kvstore.meta.sqlite.liveness import Liveness, Owner
from kvstore.meta.sqlite.store import Store
from kvstore.meta.sqlite.watch import SqliteWatch

from kvstore.errors import KVStoreError
from kvstore.format.places import METADATA
from kvstore.meta.interface import Compare, Delete, Event, Put, Snapshot, TxnResult, WatchLost
from kvstore.sources import Ids
from tests.sim.faults import Call, Faults
from tests.sim.file_history import FileHistory, Step
from tests.sim.kernel import Process
from tests.sim.metadata import MetaPort

T = TypeVar("T")

MEMORY = "/dev/shm"
BUSY_TIMEOUT = "PRAGMA busy_timeout = "
RETRY_S = 0.05
"""How often a connection tries again to get a lock."""
LOOKS_S = 0.3
"""How often a connection looks for changes by other processes: more seldom, as most looks find nothing."""
ENDINGS = ("", "-wal", "-shm")
"""Of the file, and of those that SQLite keeps beside it."""


class HostFile:
    """The file that all processes of the run share. ``told`` hears of each change at the moment it is committed."""

    def __init__(self, faults: Faults, ids: Ids, told: Callable[[Put | Delete, bool], object]) -> None:
        self.watches: list[Any] = []
        """None that could be cut: those of a file are lost with it."""
        self.faults = faults
        self.clock = BootClock(faults)
        self._boots = 0
        self._ids = ids
        self._told = told
        self.history = FileHistory(faults.kernel.fail)
        self.read_in: dict[tuple[Process, str, int], int] = {}
        """The file in which a process last looked for a watch, by the prefix and the revision to go on from."""
        self._copies = 0
        self._open: dict[Process, list[SimDatabase]] = {}
        self._ever: list[SimDatabase] = []
        self.lives: list[Liveness] = []
        self._locks: dict[Process, list[Liveness]] = {}
        self._undo = ExitStack()
        self.folder = self._undo.enter_context(
            tempfile.TemporaryDirectory(prefix="kvstore-sim-", dir=MEMORY if os.path.isdir(MEMORY) else None)
        )
        self.path = Path(self.folder) / METADATA
        note = faults.kernel.note
        # Its name is another in each run, and errors say it.
        faults.kernel.note = lambda what: note(what.replace(self.folder, ""))  # type: ignore[method-assign]

        class Sqlite3:
            """The module, for those who open the file."""

            Error, Connection = sqlite3.Error, sqlite3.Connection

            @staticmethod
            def connect(name: str, **named: Any) -> sqlite3.Connection:
                factory: Any = partial(SimDatabase, self)
                opened: sqlite3.Connection = sqlite3.connect(name, factory=factory, **named)
                return opened

        self._undo.enter_context(patch.object(file, "sqlite3", Sqlite3))
        for opens in (client, mending):
            self._undo.enter_context(patch.object(opens, "Store", SimTables))
        self._undo.enter_context(patch.object(client, "Liveness", partial(SimLiveness, self)))
        self._undo.enter_context(patch.object(connection, "POLL_S", LOOKS_S))
        self._undo.enter_context(patch.object(process, "_connections", _Own(faults)))

    def close(self) -> None:
        """Closes and removes everything."""
        for database in self._ever:
            database.close()
        for liveness in self.lives:
            liveness.close()
        self._undo.close()

    def port(self, faults: Faults) -> FilePort:
        """Returns the client of one process."""
        return FilePort(self, faults)

    def meta(self) -> SqliteMeta:
        """Returns a client of the file."""
        return SqliteMeta(self.folder, clock=self.clock, ids=self._ids, boot=self.boot)

    @property
    def boot(self) -> str:
        """The id of this boot."""
        return f"boot {self._boots}"

    def reboot(self) -> None:
        """The time since the boot begins anew, and all leases end."""
        self._boots += 1
        self.clock.booted_s = self.faults.kernel.now_s

    # What the connections say.

    def joined(self, database: SimDatabase) -> None:
        """A connection was opened."""
        actor = self.faults.kernel.current
        self._ever.append(database)
        if actor is not None:
            self._open.setdefault(actor.process, []).append(database)

    def locked(self, liveness: Liveness) -> None:
        """A client locked its byte."""
        actor = self.faults.kernel.current
        if actor is not None:
            self._locks.setdefault(actor.process, []).append(liveness)

    def committed(self, steps: Sequence[Step], inode: int) -> None:
        """A connection committed a transaction, perhaps in a file that nobody finds any more."""
        for step in steps:
            self.history.committed(inode, step)
            for change in step.operations:
                self._told(change, inode == self.inode)

    @property
    def inode(self) -> int:
        """The file that has the name now; 0 if none has it."""
        try:
            return self.path.stat().st_ino
        except FileNotFoundError:
            return 0

    # What the judge and the saboteur do, in single steps.

    def died(self, process: Process) -> None:
        """Lets go of what a killed process had locked."""
        for database in self._open.pop(process, ()):
            with suppress(sqlite3.ProgrammingError):  # it was closed before
                database.rollback()
        for liveness in self._locks.pop(process, ()):
            liveness.close()

    def rows(self, statement: str, *values: object, path: Path | None = None) -> list[tuple[Any, ...]]:
        """Reads the file as it is. Raises the errors of SQLite."""
        database = sqlite3.connect(f"file:{path or self.path}?mode=rw", uri=True, isolation_level=None, timeout=0)
        self._ever.append(database)  # type: ignore[arg-type]  # closing it now would let go of locks of this process
        return database.execute(statement, values).fetchall()

    def keys_under(self, prefix: str) -> list[str]:
        """Returns the names of the keys that live, for the judge."""
        found = self.rows(
            "SELECT key FROM keys LEFT JOIN leases ON lease = id WHERE lease = 0 OR ends_s > ?", self._now_s
        )
        return sorted(key.decode() for (key,) in found if key.decode().startswith(prefix))

    def sessions(self, prefix: str, path: Path | None = None, left_s: float = 0.0) -> set[str]:
        """Returns the sessions' keys in the file, or in a copy, whose leases last ``left_s`` longer at least."""
        found = self.rows(
            "SELECT key FROM keys JOIN leases ON lease = id WHERE ends_s > ?", self._now_s + left_s, path=path
        )
        return {key.decode() for (key,) in found if key.decode().startswith(prefix)}

    def snapshot(self) -> Path | None:
        """Copies the file, like ``sqlite3 ... .backup``; None if that cannot be."""
        self._copies += 1
        copy = Path(self.folder) / f"copy-{self._copies}"
        try:
            self.rows("VACUUM INTO ?", str(copy))
        except sqlite3.Error:
            return None
        return copy

    def restore(self, saved: Path) -> None:
        """Puts a copy in the file's place."""
        self.remove()
        again = saved.with_suffix(".again")
        again.write_bytes(saved.read_bytes())
        os.rename(again, self.path)
        rows = self.rows("SELECT modified, key, value FROM keys ORDER BY modified")
        self.history.begins(self.inode, [(revision, key.decode(), value) for revision, key, value in rows])

    @property
    def is_being_opened(self) -> bool:
        """True while a process has the file open, and those beside it not yet.

        Nobody removes it then: SQLite would take the memory of the next file for its own, because it keeps processes
        from that by locks, which do not hold within one process of the system.
        """
        return any(not database.is_whole for databases in self._open.values() for database in databases)

    def lock(self) -> Callable[[], object]:
        """Keeps all from writing, as another program may; returns what ends that. Raises the errors of SQLite."""
        database = sqlite3.connect(f"file:{self.path}?mode=rw", uri=True, isolation_level=None, timeout=0)
        self._ever.append(database)  # type: ignore[arg-type]  # as in ``rows``
        database.execute("BEGIN IMMEDIATE")
        return database.rollback

    def remove_damaged(self, before: Callable[[], object]) -> None:
        """Does what ``kvstore fsck --adopt`` does first; calls ``before`` where it removes the file."""

        def remove(path: str) -> None:
            while self.is_being_opened:
                self.faults.kernel.sleep(RETRY_S)
            before()
            real(path)

        real = mending._remove
        with patch.object(mending, "_remove", remove):
            mending.remove_damaged(self.folder, clock=self.clock, boot=self.boot)

    def remove(self) -> None:
        """Removes the file and those beside it."""
        for ending in ENDINGS:
            Path(f"{self.path}{ending}").unlink(missing_ok=True)

    def damage(self, share: float) -> int:
        """Fills pages of the file and of its log with zeros or noise; returns how many."""
        source, count = self.faults.kernel.source, 0
        for ending, start in (("", 0), ("-wal", 32 + 24)):
            path = Path(f"{self.path}{ending}")
            if not path.exists():
                continue
            page = 4096 if not ending else 4096 + 24
            with path.open("r+b") as content:
                for at in range(start, path.stat().st_size, page):
                    if source.random() < share:
                        content.seek(at)
                        content.write(bytes(4096) if source.random() < 0.5 else source.randbytes(4096))
                        count += 1
        return count

    @property
    def _now_s(self) -> float:
        return self.clock.monotonic_s()


class SimLiveness(Liveness):
    """The lock of a client in one process. The judge lets go of it when the process is killed."""

    def __init__(self, host: HostFile, folder: str) -> None:
        super().__init__(folder)
        self._host = host
        host.lives.append(self)

    def owner(self) -> Owner:
        """As that of ``Liveness``."""
        self._host.locked(self)
        return super().owner()


class BootClock:
    """The time since the host was booted."""

    def __init__(self, faults: Faults) -> None:
        self._kernel = faults.kernel
        self.booted_s = -1000.0

    def now_s(self) -> float:
        raise AssertionError("no lease ends by the wall clock")

    def monotonic_s(self) -> float:
        return self._kernel.now_s - self.booted_s


class SimDatabase(sqlite3.Connection):
    """A connection of one process: others may run before each of its statements, and it never waits in real time."""

    def __init__(self, host: HostFile, name: str, *, timeout: float = 0.0, **named: Any) -> None:
        named.pop("factory", None)
        super().__init__(name, timeout=0, **named)
        self.host = host
        self._patience_s = timeout
        self.inode = os.stat(unquote(name.removeprefix("file:").partition("?")[0])).st_ino
        self.is_whole = False
        """True once it has opened all its files, or was given up."""
        self.steps: list[Step] = []
        """What it is about to commit."""
        host.joined(self)

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        """As ``sqlite3.Connection.execute``."""
        if statement.startswith(BUSY_TIMEOUT):
            self._patience_s = int(statement.removeprefix(BUSY_TIMEOUT)) / 1000
            statement = "PRAGMA busy_timeout"
        faults = self.host.faults
        faults.maybe_pause(Call.STATEMENT)
        faults.kernel.point()
        found = self._when_free(statement, values)
        if statement == "PRAGMA user_version":
            self.is_whole = True
        elif statement.startswith("BEGIN"):
            self.steps = []
        elif statement == "COMMIT":
            self.tells()
        return found

    def close(self) -> None:
        """As that of ``sqlite3.Connection``."""
        self.is_whole = True
        super().close()

    def tells(self) -> None:
        """What it has done can be seen by all."""
        self.host.committed(self.steps, self.inode)
        self.steps = []

    def _when_free(self, statement: str, values: Any) -> sqlite3.Cursor:
        kernel = self.host.faults.kernel
        ends_s = kernel.now_s + self._patience_s
        while True:
            try:
                return super().execute(statement, values)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or kernel.now_s >= ends_s:
                    raise
            self.host.faults.count("statements that waited for a lock")
            kernel.sleep(RETRY_S)


class SimTables(Store):
    """Tells its connection what it is about to change."""

    _database: SimDatabase
    _compared: tuple[object, Sequence[Compare]] = (None, ())

    def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        self._compared = operations, compares
        return super().txn(compares, operations)

    def list(self, prefix: str) -> Snapshot:
        found = super().list(prefix)
        self._database.host.history.listed(self._database.inode, prefix, found)
        return found

    def events(self, prefix: str, from_revision: int) -> tuple[tuple[Event, ...], int]:
        events, behind = super().events(prefix, from_revision)
        host, actor = self._database.host, self._database.host.faults.kernel.current
        if actor is not None:
            host.read_in[actor.process, prefix, behind] = self._database.inode
        return events, behind

    def _apply(self, operations: Sequence[Put | Delete]) -> bool:
        database, (own, compares) = self._database, self._compared
        has_changed = super()._apply(operations)
        (revision,) = sqlite3.Connection.execute(database, "SELECT revision FROM state").fetchone()
        database.steps.append(Step(revision, operations, compares if operations is own else ()))
        if not database.in_transaction:
            database.tells()
        return has_changed


class FilePort(MetaPort):
    """One process's client of the file. All its faults are those of statements."""

    may_land = False

    def __init__(self, host: HostFile, faults: Faults) -> None:
        super().__init__(host.meta(), host, faults)  # type: ignore[arg-type]
        self._host = host

    def watch(self, prefix: str, from_revision: int) -> FileWatch:
        """See ``interface.Meta``."""
        watch = self._inner.watch(prefix, from_revision)
        assert isinstance(watch, SqliteWatch)
        return FileWatch(watch, self._host)

    def _read(self, operation: str, key: str, timeout_s: float | None, call: Callable[[], T]) -> T:
        return super()._read(operation, key, timeout_s, lambda: self._noted(operation, call))

    def _change(self, operation: str, key: str, timeout_s: float | None, call: Callable[[], T], purpose: str = "") -> T:
        return super()._change(operation, key, timeout_s, lambda: self._noted(operation, call), purpose)

    def _noted(self, operation: str, call: Callable[[], T]) -> T:
        actor = self._kernel.current
        assert actor is not None
        try:
            return call()
        except KVStoreError as error:
            actor.process.faults_count += 1
            self._faults.count("metadata calls failed")
            self._kernel.note(f"{operation}: {error}")
            raise


class FileWatch:
    """A watch of the file, which says what it sees."""

    def __init__(self, inner: SqliteWatch, host: HostFile) -> None:
        self._inner = inner
        self._host = host
        self._faults = host.faults
        self._inode: int | None = None

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        """See ``interface.Watch``."""
        kernel, first = self._faults.kernel, self._inner._from_revision
        kernel.point()
        try:
            events = self._inner.next(timeout_s)
            self._judge(first, events or ())
        except WatchLost:
            self._faults.count("watches lost")
            raise
        if any("/gc/condemned/" in event.key for event in events or ()):
            kernel.happened("heard")
        kernel.point()
        return events

    def close(self) -> None:
        """See ``interface.Watch``."""
        self._inner.close()

    def _judge(self, first: int, events: Sequence[Event]) -> None:
        actor, prefix, behind = self._faults.kernel.current, self._inner._prefix, self._inner._from_revision
        assert actor is not None
        if behind == first:
            return
        inode = self._host.read_in[actor.process, prefix, behind]
        if self._inode not in (None, inode):
            self._faults.kernel.fail("M2: a watch went on in another file")
        self._inode = inode
        self._host.history.watched(inode, prefix, first, behind, events)


class _Own:
    """The connections of this process, for each of the run's processes."""

    def __init__(self, faults: Faults) -> None:
        self._kernel = faults.kernel
        self._of: dict[Process | None, list[process.Open]] = {}

    def add(self, one: process.Open) -> None:
        self._mine.append(one)

    def discard(self, one: process.Open) -> None:
        if one in self._mine:
            self._mine.remove(one)

    def __iter__(self) -> Iterator[process.Open]:
        return iter(self._mine)

    @property
    def _mine(self) -> list[process.Open]:
        actor = self._kernel.current
        return self._of.setdefault(actor.process if actor else None, [])
