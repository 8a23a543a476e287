"""A folder of one host as simulated processes see it: real files, mapped memory and locks, each use of them a step.

Wraps what the code under test calls: ``os``, ``fcntl``, ``time`` and ``open`` in its modules, and mapped memory. A
killed process loses its locks, as the kernel of a host would have it, and leaves its files. Time of change is that of
the simulation, in ticks, so that the code finds chunks older and younger than a listing.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from kvstore.engine import chunk_store, gc_state
from kvstore.engine import host as host_module
from kvstore.format.places import PINS, Name
from kvstore.host import eviction, tables
from kvstore.root import posix
from kvstore.root.interface import FolderEntry, StorageSpace
from kvstore.root.posix import PosixRoot
from kvstore_gc import host as gc_host
from tests.sim.kernel import WALL_S, Kernel, Process

T = TypeVar("T")

RING = 8
BATCH_MAX = 4
TABLE_BYTES = tables.PAGE_BYTES + 2 * 16
"""So the log is overrun, an eviction has several batches, and tables grow."""
LOCK_POLL_S = 0.005
AIMS = {
    "store TAIL": ("held", "linked"),
    "listdir host/holds": ("held", "linked", "pinned"),
    "scandir pins": ("held", "pinned>released", "released"),
    "unlink chunks": ("held", "linked", "pinned"),
    "link pins": ("deleted", "pins read"),
    "write entry": ("appended", "deleted"),
    "load TAIL": ("appended", "deleted"),
    "looked at chunks": ("appended", "deleted", "deleted>settled>forgot"),
    "link chunks": ("appended", "deleted"),
}
"""Steps at which a process may stand still, and the events that it waits for, one after the other."""
HOST = ("clears", "eviction", "tables")
TIMED = (
    "kvstore.engine.clear",
    "kvstore.host.clears",
    "kvstore.host.tables",
    "kvstore.engine.host",
    "kvstore.engine.gc_state",
)


class SimRoot(PosixRoot):
    """A subclass, so native code, which makes many steps at once, leaves its files alone."""

    def list(self, folder: Name) -> Iterator[FolderEntry]:
        return iter(sorted(super().list(folder), key=lambda entry: entry.name))

    def space(self) -> StorageSpace:
        return StorageSpace(1 << 50, 1 << 50)


class Files:
    """The system calls of all processes. Undone by ``end``."""

    def __init__(
        self,
        kernel: Kernel,
        folder: str,
        linked: Callable[[str], None],
        left: Callable[[str], None],
        pause: float,
        aim: float,
    ) -> None:
        """``linked`` and ``left`` are called with the name of a file that appears or disappears; ``pause`` is how
        often a process stands still at a step, ``aim`` how often it does where the rules are about the order.
        """
        self.kernel = kernel
        self.folder = folder
        self.labels: dict[str, str] = {}
        """Short names of files, for traces."""
        self._linked = linked
        self._left = left
        self._pause = pause
        self._aim = aim
        self._tick = kernel.source.choice((1, 5, 40))
        self._changed_ns: dict[int, int] = {}
        self._locks: dict[Process | None, set[int]] = {}
        self.lowered: Callable[[str], object] = _ignore
        """Called with the name of a file whose stamp becomes older."""
        self.shared: list[tables.Shared] = []
        """All that were mapped."""
        self._null = os.open("/dev/null", os.O_RDWR)
        self._undo = ExitStack()
        self._install()

    def end(self) -> None:
        """Ends all simulation, and closes what killed processes have left."""
        self._undo.close()
        for fd in {self._null}.union(*self._locks.values()):
            os.close(fd)
        for mapped in self.shared:
            mapped._fd = -1  # or it would close the number again, which is another file's by then

    def died(self, process: Process) -> None:
        """The kernel of the host drops the locks of a process. Its frames, which never go on, still own the numbers."""
        for fd in self._locks.get(process, ()):
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.dup2(self._null, fd)

    def point(self, label: str) -> None:
        """Another process may run before this step."""
        kernel = self.kernel
        if kernel.current is None:
            return
        kernel.point()
        for prefix, events in AIMS.items():
            if self._aim and label.startswith(prefix) and kernel.random() < self._aim:
                until = (kernel.source.choice(events).split(">"), int(60 ** kernel.random()))
                kernel.pause(250, until, kernel.source.choice((0.05, 0.3, 1.5)))
        if self._pause and kernel.random() < self._pause:
            kernel.pause(int(300 ** kernel.random()) * 2, None, kernel.source.choice((0.05, 0.3, 1.5)))
        kernel.note(label)

    def now_s(self) -> float:
        """The wall clock of the host."""
        return WALL_S + self.kernel.now_s

    # The modules ``os``, ``fcntl`` and ``time``.

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self.point(f"open {self._short(path)}")
        fd = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            self._changed_ns[os.fstat(fd).st_ino] = self._file_ns()
        return fd

    def lstat(self, path: str) -> Any:
        self.point(f"lstat {self._short(path)}")
        found = os.lstat(path)
        self.point(f"looked at {self._short(path)}")
        changed_ns = self._changed_ns.get(found.st_ino, 0)
        return SimpleNamespace(
            st_mode=found.st_mode,
            st_size=found.st_size,
            st_mtime_ns=found.st_mtime_ns,
            st_ctime_ns=changed_ns,
            st_ctime=changed_ns / 1e9,
        )

    stat = lstat

    def utime(self, path: str | int, times: None = None, *, ns: tuple[int, int] | None = None) -> None:
        self.point(f"utime {self._short(path)}")
        if isinstance(path, str) and ns is not None and ns[1] < os.stat(path).st_mtime_ns:
            self.lowered(path[len(self.folder) + 1 :])
        os.utime(path, ns=ns) if ns is not None else os.utime(path)
        self._changed_ns[os.stat(path).st_ino] = self._file_ns()

    def chmod(self, path: str, mode: int) -> None:
        self.point(f"chmod {self._short(path)}")
        os.chmod(path, mode)
        self._changed_ns[os.stat(path).st_ino] = self._file_ns()

    def link(self, source: str, path: str) -> None:
        self.point(f"link {self._short(path)}")
        os.link(source, path)
        self._changed_ns[os.stat(path).st_ino] = self._file_ns()
        self._linked(path[len(self.folder) + 1 :])

    def unlink(self, path: str) -> None:
        self.point(f"unlink {self._short(path)}")
        os.unlink(path)
        self._left(path[len(self.folder) + 1 :])

    def rename(self, source: str, path: str) -> None:
        self.point(f"rename {self._short(path)}")
        os.rename(source, path)
        self._left(source[len(self.folder) + 1 :])

    def scandir(self, path: str) -> Any:
        self.point(f"scandir {self._short(path)}")
        if path.endswith(PINS):
            self.kernel.happened("pins read")
        return os.scandir(path)

    def listdir(self, path: str) -> list[str]:
        self.point(f"listdir {self._short(path)}")
        return sorted(os.listdir(path))

    def urandom(self, count: int) -> bytes:
        return self.kernel.source.randbytes(count)

    def getpid(self) -> int:
        return 1

    def flock(self, fd: int, kind: int) -> None:
        self.point(f"flock {kind}")
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if kind & fcntl.LOCK_NB:
                    raise
            self.kernel.sleep(LOCK_POLL_S)

    # Descriptors that may have locks.

    def _own(self, fd: int) -> int:
        actor = self.kernel.current
        self._locks.setdefault(actor.process if actor is not None else None, set()).add(fd)
        return fd

    def _disown(self, fd: int) -> None:
        for fds in self._locks.values():
            fds.discard(fd)

    def _open_locked(self, path: str, flags: int, mode: int = 0o777) -> int:
        return self._own(self.open(path, flags, mode))

    def _close_locked(self, fd: int) -> None:
        self._disown(fd)
        os.close(fd)

    def _open_file(self, file: str | int, mode: str = "r", **options: Any) -> Any:
        self.point(f"read {self._short(file)}")
        if mode != "ab":
            opened = open(file, mode, **options)  # noqa: SIM115 - its caller closes it
            if "opener" in options:
                self._disown(opened.fileno())
            return opened
        files = self

        class Locked(io.FileIO):
            def close(self) -> None:
                if not self.closed:
                    files._disown(self.fileno())
                super().close()

        locked = Locked(file, mode, **options)
        self._own(locked.fileno())
        return locked

    # Putting it in the place of the real ones.

    def _install(self) -> None:
        replace = self._undo.enter_context
        locking = _Locking(self)
        for name in (*(f"kvstore.host.{name}" for name in HOST), "kvstore_gc.host"):
            module = importlib.import_module(name)
            replace(patch.object(module, "os", locking))
            if hasattr(module, "fcntl"):
                replace(patch.object(module, "fcntl", _Fcntl(self)))
            if name.endswith(("clears", "tables")):
                replace(patch.object(module, "open", self._open_file, create=True))
        mount = posix.mount_of(self.folder)
        replace(patch.object(posix, "mount_of", lambda path: mount))
        replace(patch.object(posix, "os", self))
        kernel = self.kernel
        clock = SimpleNamespace(
            monotonic=lambda: kernel.now_s,
            monotonic_ns=lambda: int(kernel.now_s * 1e9),
            time=self.now_s,
            sleep=kernel.sleep,
        )
        for name in (*TIMED, "kvstore_gc.host"):
            replace(patch(f"{name}.time", clock))
        system_clock = SimpleNamespace(now_s=self.now_s, monotonic_s=lambda: kernel.now_s)
        replace(patch.object(gc_host, "SystemClock", lambda: system_clock))
        replace(patch.object(gc_host, "open_root", lambda url, options, create: SimRoot(self.folder)))
        replace(patch.object(host_module, "atexit", SimpleNamespace(register=_ignore, unregister=_ignore)))
        replace(patch.object(host_module, "Collecting", _NoChild))
        release = tables.SpaceReservation.__del__

        def end(reserved: tables.SpaceReservation) -> None:
            if not kernel.over and kernel.current is not None:
                release(reserved)

        replace(patch.object(tables.SpaceReservation, "__del__", end))
        for module, name, value in (
            (tables, "RING", RING),
            (tables, "BATCH_MAX", BATCH_MAX),
            (tables, "_BYTES", tables.PAGE_BYTES + RING * 16),
            (gc_state, "RING", RING),
            (gc_state, "BATCH_MAX", BATCH_MAX),
            (eviction, "BATCH_MAX", BATCH_MAX),
            (gc_host, "BATCH_MAX", BATCH_MAX),
            (tables, "SIZE_BYTES_MIN", TABLE_BYTES),
            (tables, "_serials", itertools.count()),
        ):
            replace(patch.object(module, name, value))
        replace(patch.object(tables.Mapped, "add", self._added(tables.Mapped.add)))
        replace(patch.object(tables.Mapped, "numbers", _stepwise(self, "numbers", _Numbers), create=True))
        forget = chunk_store.PresenceCache.forget_each

        def forget_each(self: chunk_store.PresenceCache, packed: bytes) -> None:
            forget(self, packed)
            kernel.happened("forgot")

        replace(patch.object(chunk_store.PresenceCache, "forget_each", forget_each))
        replace(patch.object(tables.Shared, "_ring", _stepwise(self, "_ring", _Entries), create=True))
        replace(patch.object(tables.HoldTable, "_bytes", _stepwise(self, "_bytes", _Entries), create=True))

    def _added(self, real: Callable[[Any, int, int], int]) -> Callable[[Any, int, int], int]:
        def add(mapped: tables.Mapped, place: int, delta: int) -> int:
            self.point(f"add {_number(mapped, place)} {delta}")
            return real(mapped, place, delta)

        return add

    def _file_ns(self) -> int:
        """The clock that stamps files: it advances in ticks, in which nobody sees an order."""
        return int(self.now_s() * 1e9) + self.kernel.steps // self._tick * 1000

    def _short(self, path: str | int) -> str:
        if isinstance(path, int):
            return "a file"
        name = path[len(self.folder) + 1 :]
        return f"chunks {self.labels[name]}" if name in self.labels else name


class _Locking:
    """``os`` of the modules that lock files."""

    def __init__(self, files: Files) -> None:
        self.open, self.close, self._files = files._open_locked, files._close_locked, files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


class _Fcntl:
    def __init__(self, files: Files) -> None:
        self.flock = files.flock

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)


class _NoChild:
    """``Collecting``: collectors are processes of the simulation."""

    is_running = False

    def __init__(self, folder: str) -> None:
        """Starts nothing."""

    def wake(self, *, at_once: bool = False) -> None:
        """A collector looks by itself."""

    def close(self) -> None:
        """Ends nothing."""


class _Numbers:
    """The numbers of a mapped file."""

    def __init__(self, files: Files, owner: Any, memory: memoryview) -> None:
        self._files, self._owner, self._memory = files, owner, memory

    def __getitem__(self, place: int) -> int:
        self._files.point(f"load {_number(self._owner, place)}")
        return self._memory[place]

    def __setitem__(self, place: int, value: int) -> None:
        name = _number(self._owner, place)
        self._files.point(f"store {name} {value}")
        self._memory[place] = value
        if name in ("TAIL", "SETTLED"):
            self._files.kernel.happened("appended" if name == "TAIL" else "settled")

    def release(self) -> None:
        """Releases the memory."""
        self._memory.release()


class _Entries:
    """Addresses in a mapped file, read and written one by one."""

    def __init__(self, files: Files, owner: Any, memory: memoryview) -> None:
        self._files, self._memory = files, memory

    def __getitem__(self, part: slice) -> bytes:
        return b"".join(bytes(self._memory[at:stop]) for at, stop in self._each(part, "read entry"))

    def __setitem__(self, part: slice, content: bytes) -> None:
        start = part.start or 0
        for at, stop in self._each(part, "write entry"):
            self._memory[at:stop] = content[at - start : stop - start]

    def release(self) -> None:
        """Releases the memory."""
        self._memory.release()

    def _each(self, part: slice, label: str) -> Iterator[tuple[int, int]]:
        start, stop, _ = part.indices(len(self._memory))
        for at in range(start, stop, 16):
            self._files.point(label)
            yield at, min(at + 16, stop)


def _stepwise(files: Files, name: str, kind: Callable[[Files, Any, memoryview], Any]) -> property:
    def get(owner: Any) -> Any:
        return kind(files, owner, vars(owner)[name])

    def put(owner: Any, memory: memoryview) -> None:
        vars(owner)[name] = memory
        if isinstance(owner, tables.Shared):
            files.shared.append(owner)

    return property(get, put)


def _number(mapped: Any, place: int) -> str:
    return tables.Number(place).name if isinstance(mapped, tables.Shared) else tables.Own(place).name


def _ignore(*_: object) -> None:
    pass
