"""The mapped files that processes of one host share: counters, the eviction log, hold tables and free space.

``host/shared`` has a few numbers, and the log: a ring of addresses. Who evicts appends a batch of victims, advances
TAIL, and sets SETTLED to TAIL once it is done with all of them (``eviction``). Every process reads it, to forget chunks
that are gone (``host_view``).

Each process has a hold table, a file with the addresses of the chunks that it holds, mapped and locked. When a process
ends, in whatever way, the kernel drops its lock; then the table no longer counts, and any process that sees that
removes it. A table is locked before it has its name, so that no process mistakes a new one for an abandoned one.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

import numpy as np

from kvstore.core.address import ADDRESS_BYTES
from kvstore.core.clock import Clock, Ids
from kvstore.core.process import FORGOTTEN_BY_CHILDREN
from kvstore.core.validate import size
from kvstore.errors import Overloaded, RootMismatch, StoreFull, Unavailable
from kvstore.format.header import Generation
from kvstore.native import library as native
from kvstore.root.identity import newest_number, publish
from kvstore.root.interface import Root
from kvstore.root.posix import FILE_MODE, FOLDER_MODE, DiskFull, PosixRoot, error_of, file_system_type, translated

# The folder ``host`` of a root, through which the processes of one host share it; and whether they may.
#
# The file system must be of this host alone: on a network file system two hosts would not see each other's locks, and
# a mapped file is memory of one host. Every process that shares a root has a shared lock on its file FORMAT, which
# no process replaces. Files of ``host`` are made under the exclusive one, so only while no process uses the root.


FOLDER = "host"
HOLDS = f"{FOLDER}/holds"
SHARED = f"{FOLDER}/shared"
EVICTING = f"{FOLDER}/evicting.lock"
COLLECTOR = f"{FOLDER}/collector.lock"
CLEARS = f"{FOLDER}/clears"


JOIN_LOOKS = 1000
"""How often a process looks for the files that another one makes, every 10 ms: a count, because it may be stopped."""
EVICTING_S = 60.0
"""A batch of evictions takes less."""

_LOCAL = {
    0xEF53: "ext4",  # ext2 and ext3 too
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0xF2F52010: "F2FS",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
}
"""File systems that one kernel alone writes to, by their number in statfs(2)."""
_STATFS_BYTES = 256  # more than the structure has


def why_not_shared(folder: str) -> str | None:
    """Returns why the processes of this host cannot share ``folder`` without etcd; None if they can.

    A file system that is not known as local is refused. Raises Unavailable if the folder cannot be looked at.
    """
    if sys.platform != "linux":
        return "local file systems can be recognised only on Linux: use etcd"
    number = _file_system(folder)
    if number not in _LOCAL:
        name = file_system_type(folder) or f"a file system of type {number:#x}"
        return f"{folder} is on {name}, which other hosts may write to as well: use etcd"
    return None


class InUse:
    """The lock of a process that shares the root at ``folder``, from ``join`` to ``close``."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/FORMAT"
        self._fd = -1

    def join(self, is_made: Callable[[], bool], make: Callable[[], None]) -> None:
        """Takes the lock. Where the files of ``host`` are not ``is_made``, makes them while no process uses the root.

        Raises RootMismatch if they are missing while others use the root, and OSError.
        """
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        FORGOTTEN_BY_CHILDREN.add(self)
        for _ in range(JOIN_LOOKS):
            if locked(self._fd, fcntl.LOCK_SH) and is_made():
                return
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            if locked(self._fd) and not is_made():
                make()
            time.sleep(0.01)
        raise RootMismatch(
            f"{os.path.dirname(self._path)}/{FOLDER} was removed or damaged while other processes use the root:"
            " end them, and open it again"
        )

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    forget = close


def is_locked(path: str, flags: int = os.O_RDONLY) -> bool:
    """True while another process has a lock on a file. Raises the root's errors."""
    with translated("lock", path):
        fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    try:
        return not locked(fd)
    finally:
        _unlock(fd)


@contextmanager
def evicting_lock(folder: str, *, waits: bool = True) -> Iterator[None]:
    """Has the lock of those that evict. Raises the root's errors, and Unavailable if another process has it: for
    EVICTING_S if it ``waits``.
    """
    path = f"{folder}/{EVICTING}"
    with translated("lock", path):
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        if not locked(fd, wait_s=EVICTING_S if waits else 0.0):
            raise Unavailable(f"{path} stays locked: the process that evicts is stopped, or its disk hangs")
        yield
    finally:
        _unlock(fd)


def _unlock(fd: int) -> None:
    """Unlocks a file before closing it: a child forked in the meantime has it open, and would keep the lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def locked(fd: int, kind: int = fcntl.LOCK_EX, wait_s: float = 0.0) -> bool:
    """Locks a file; False if another process has it locked for longer than ``wait_s``. Raises OSError."""
    ends_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= ends_s:
                return False
        time.sleep(POLL_S)


def _file_system(folder: str) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(folder), buffer) != 0:
        raise Unavailable(f"could not look at the file system of {folder}: {os.strerror(ctypes.get_errno())}")
    return int(ctypes.c_ulong.from_buffer(buffer).value) & 0xFFFFFFFF


# A cluster takes over a root of one host, once the processes that shared it have ended (rule C6).


log = logging.getLogger(__name__)


def check_left(root: Root) -> None:
    """Raises RootMismatch while processes of this host share a root without etcd: a cluster does not see their holds.

    Once the root is a cluster's they protect and collect nothing there, so that it need not wait for them.
    """
    if not isinstance(root, PosixRoot) or newest_number(root):
        return
    if os.path.isdir(f"{root.path}/{FOLDER}") and is_locked(f"{root.path}/FORMAT"):
        raise RootMismatch(
            f"{root.url} is in use by processes of this host that share it without etcd, and a cluster would not know "
            "what they hold: end them first, or leave out etcd (is KVSTORE_ETCD set?)"
        )


def publish_first(root: Root, generation: Generation, *, ids: Ids, clock: Clock) -> Generation:
    """Publishes as ``publish`` does, if ``check_left`` allows it at this moment."""
    check_left(root)
    if not newest_number(root) and isinstance(root, PosixRoot) and os.path.isdir(f"{root.path}/{FOLDER}"):
        log.warning("root.taken_over %s was of one host, without etcd: now it belongs to a cluster", root.url)
    return publish(root, generation, ids=ids, clock=clock)


RING = 1 << 16
"""Entries of the log."""
BATCH_MAX = 1 << 12
"""Victims of one batch. A reader less than ``RING - BATCH_MAX`` behind reads entries that are not overwritten."""
PAGE_BYTES = 4096
_own_number = ctypes.c_int64()
_OWN = ctypes.addressof(_own_number)
"""A number of this process alone, for additions whose order is all that counts."""
_MAGIC = int.from_bytes(b"KVHOST1\0", "little")
_BYTES = PAGE_BYTES + RING * ADDRESS_BYTES


class Number(IntEnum):
    """The numbers, by their place. All but the first two count bytes, from the day on which the file was made."""

    MAGIC = 0
    TAIL = 1
    """Entries that were ever appended to the log."""
    SETTLED = 2
    """Entries that are dealt with."""
    USED = 3
    """Bytes of the root's files and of puts that have begun; a listing corrects it."""
    WRITTEN = 4
    DELETED = 5
    """Upper bound of deleted bytes, for listings: an eviction counts before and after its unlink."""
    LIMIT = 6
    """No put begins that would bring USED above this; 0: no limit."""
    WAKES_AT = 7
    """Above this the collector makes room."""
    FULL = 8
    """When a collector last found that nothing can be evicted, by ``time.monotonic_ns``; 0: it has found room since."""
    CLEARS = 9
    """How many clears were ordered."""
    LISTINGS = 10
    """How many listings have begun."""
    BEATS = 11
    """How often the collector looked."""
    BEGUN = 12
    """Bytes that puts have ever reserved, for listings: a put counts here before it counts in USED."""


class Mapped:
    """Numbers at the beginning of a mapped file. Thread-safe."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._lock = threading.RLock()  # a put that is dropped gives its room back from wherever its thread is
        self.map = mmap.mmap(fd, size_bytes)
        self.numbers = memoryview(self.map)[:PAGE_BYTES].cast("q")
        self._at = np.frombuffer(self.map, np.uint8).ctypes.data

    def __getitem__(self, place: int) -> int:
        return self.numbers[place]

    def __setitem__(self, place: int, value: int) -> None:
        self.numbers[place] = value

    def add(self, place: int, delta: int) -> int:
        """Adds to a number, as one step for all processes; returns the sum."""
        with self._lock:
            if not self._at:
                return 0  # it was unmapped: the store is closed
            return int(native.brief.kv_shared_add(self._fd, self._at + 8 * place, delta))

    def unmap(self) -> None:
        """Gives the memory back: as long as it is mapped, the file system cannot be unmounted. Idempotent."""
        with self._lock:
            self._at = 0
        self.numbers.release()
        with suppress(BufferError):  # a view of it still exists: then it is closed with that
            self.map.close()

    def fence(self) -> None:
        """Orders the loads and stores before it and those after it, for all processes."""
        with self._lock:
            if self._at:
                native.brief.kv_shared_add(self._fd, _OWN, 0)


class Shared(Mapped):
    """The file ``host/shared`` of the root at ``folder``."""

    def __init__(self, folder: str) -> None:
        """Raises OSError, and ValueError for a file that is none."""
        self._fd = -1  # nothing to close yet
        fd = os.open(f"{folder}/{SHARED}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != _BYTES:
                raise ValueError(f"{folder}/{SHARED} has another size")
            super().__init__(fd, _BYTES)
        except BaseException:
            self._fd = -1
            os.close(fd)
            raise
        self._ring = memoryview(self.map)[PAGE_BYTES:]
        if self[Number.MAGIC] != _MAGIC:
            raise ValueError(f"{folder}/{SHARED} is another file")

    def append(self, packed: bytes) -> None:
        """Appends at most BATCH_MAX addresses to the log, one after the other in ``packed``, and advances TAIL."""
        count, tail = len(packed) // ADDRESS_BYTES, self[Number.TAIL]
        assert count <= BATCH_MAX
        at = tail % RING
        first = min(count, RING - at) * ADDRESS_BYTES
        self._ring[at * ADDRESS_BYTES : at * ADDRESS_BYTES + first] = packed[:first]
        self._ring[: len(packed) - first] = packed[first:]
        self.fence()
        self[Number.TAIL] = tail + count

    def entries(self, start: int, stop: int) -> bytes:
        """Returns the packed addresses of some entries of the log, which must not be more than there are."""
        at, count = start % RING, stop - start
        first = self._ring[at * ADDRESS_BYTES : min(RING, at + count) * ADDRESS_BYTES]
        return bytes(first) + bytes(self._ring[: count * ADDRESS_BYTES - len(first)])

    def close(self) -> None:
        """Closes the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._ring.release()
            self.unmap()

    __del__ = close


def is_made(folder: str) -> bool:
    """True if the file exists and has this version. Raises OSError if that cannot be determined."""
    try:
        Shared(folder).close()
    except (FileNotFoundError, ValueError):
        return False
    return os.path.isdir(f"{folder}/{HOLDS}")


def make(folder: str, used_bytes: int) -> None:
    """Makes the file anew, while no process uses the root. Allocates all of it on the disk now: a mapped file that
    lacks space ends the process that writes to it. Raises OSError.
    """
    for made in (FOLDER, HOLDS):
        os.makedirs(f"{folder}/{made}", FOLDER_MODE, exist_ok=True)
    path = f"{folder}/{SHARED}"
    fd = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.posix_fallocate(fd, 0, _BYTES)
        numbers = np.zeros(PAGE_BYTES // 8, "<i8")
        numbers[[Number.MAGIC, Number.USED]] = _MAGIC, used_bytes
        os.pwrite(fd, numbers.tobytes(), 0)
    finally:
        os.close(fd)
    os.rename(f"{path}.new", path)


SIZE_BYTES_MIN = 64 << 10
_serials = itertools.count()


class Own(IntEnum):
    """The numbers at the beginning of a table, by their place: what else others need to know of the process."""

    RESERVED = 0
    """Bytes of puts that have begun, and have no file yet."""
    MAX_BYTES = 1
    """The capacity that it asks for; 0: none."""
    TTL_MS = 2
    """The time to live that it asks for; 0: none."""
    PUT_MAX = 3
    """Bytes of its largest put."""
    CLEARS = 4
    """It has done what the first of all clears ask of its memory."""
    WAITING = 5
    """Bytes of puts that wait for room."""


SESSION_AT = 8 * 8
SESSION_BYTES = 16
"""Behind the numbers: the name of the folder in which the process stages."""
CLEARS_NONE = (1 << 63) - 1
"""``Own.CLEARS`` of a process that keeps no chunks in memory."""


Run = tuple[int, int]
"""Consecutive entries: from which byte of the file on, and up to which."""


class HoldTable:
    """The table of this process for the root at ``folder``. Thread-safe."""

    def __init__(self, folder: str) -> None:
        """Raises OSError."""
        self.name = f"{os.getpid()}.{next(_serials)}.{os.urandom(4).hex()}"
        self._lock = threading.Lock()
        self._free: list[Run] = []
        self._mapped: list[Mapped] = []
        self._size_bytes = PAGE_BYTES
        path = f"{folder}/{HOLDS}/{self.name}"
        while True:
            hidden = f"{folder}/{HOLDS}/.{self.name}"
            self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            self._mapped_fd = -1
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                # Another open file: mmap keeps a duplicate of it, with which a forked child would keep the lock.
                self._mapped_fd = os.open(hidden, os.O_RDWR | os.O_CLOEXEC)
                self._grow(SIZE_BYTES_MIN)
                os.rename(hidden, path)
                break
            except FileNotFoundError:  # it was taken for one that was left
                self._close_files()
                self._free, self._size_bytes = [], PAGE_BYTES
            except BaseException:
                with suppress(OSError):
                    os.unlink(hidden)
                self._close_files()
                raise
        self.path = path
        FORGOTTEN_BY_CHILDREN.add(self)

    def add(self, packed: bytes) -> Run:
        """Adds addresses, one after the other in ``packed``. Raises OSError if the disk has no room for more."""
        with self._lock:
            run = self._take(len(packed))
            self._bytes[run[0] : run[1]] = packed
        return run

    def remove(self, run: Run) -> None:
        """Removes what ``add`` added, once."""
        start, stop = run
        with self._lock:
            if self._fd >= 0:
                self._bytes[start:stop] = bytes(stop - start)
                self._give_back(start, stop)

    @property
    def is_open(self) -> bool:
        """False once it was closed, and in a forked child."""
        return self._fd >= 0

    def stages_in(self, session: bytes) -> None:
        """Notes in which folder this process stages from now on."""
        with self._lock:
            if self._fd >= 0:  # a session may begin while the store closes
                self._bytes[SESSION_AT : SESSION_AT + SESSION_BYTES] = session

    def close(self) -> None:
        """Ends all holds. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                with suppress(OSError):
                    os.unlink(self.path)
                self._close_files()
                self._bytes.release()
                for mapped in self._mapped:
                    mapped.unmap()

    def forget(self) -> None:
        """Closes the files, in a forked child: without this the table would count as long as the child lives."""
        self._close_files()

    def _close_files(self) -> None:
        fds, self._fd, self._mapped_fd = (self._fd, self._mapped_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _take(self, size_bytes: int) -> Run:
        """Takes the first free run that is long enough."""
        free = self._free
        for at, (start, stop) in enumerate(free):
            if stop - start > size_bytes:
                free[at] = start + size_bytes, stop
                return start, start + size_bytes
            if stop - start == size_bytes:
                del free[at]
                return start, stop
        self._grow(max(2 * self._size_bytes, self._size_bytes + size_bytes))
        return self._take(size_bytes)

    def _give_back(self, start: int, stop: int) -> None:
        """Makes a run free, and joins it with its free neighbours."""
        free = self._free
        first = last = bisect_left(free, (start, stop))
        if first < len(free) and free[first][0] == stop:
            stop, last = free[first][1], first + 1
        if first and free[first - 1][1] == start:
            start, first = free[first - 1][0], first - 1
        free[first:last] = [(start, stop)]

    def _grow(self, size_bytes: int) -> None:
        """Makes the file larger. All of it gets its room on the disk now, as in ``shared.make``."""
        before_bytes = os.fstat(self._mapped_fd).st_size  # what is mapped already may be written at this moment
        os.posix_fallocate(self._mapped_fd, before_bytes, size_bytes - before_bytes)
        self.numbers = Mapped(self._mapped_fd, size_bytes)
        self._mapped.append(self.numbers)  # one that others use at this moment stays until the table is closed
        self._bytes = memoryview(self.numbers.map)
        self._give_back(self._size_bytes, size_bytes)
        self._size_bytes = size_bytes


@dataclass(frozen=True, slots=True)
class LiveTable:
    """A table of a live process as read."""

    name: str
    numbers: tuple[int, ...]
    session: str
    """The folder in which the process stages, as hexadecimal."""
    held: bytes
    """The addresses that it holds, and zeros, one after the other."""


def live_tables(folder: str, shared: Shared, *, whole: bool = False) -> list[LiveTable]:
    """Returns the tables of live processes; removes those of others, and frees what these had reserved.

    Unless it is ``whole``, a table is without what is held. Raises OSError, and PermissionDenied for that of another
    account.
    """
    live: list[LiveTable] = []
    for name in os.listdir(f"{folder}/{HOLDS}"):
        path = f"{folder}/{HOLDS}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as cause:
            raise error_of("read", path, cause) from cause
        try:
            is_left = locked(fd)
            with open(fd, "rb", closefd=False) as file:
                content = file.read(-1 if whole else SESSION_AT + SESSION_BYTES)
            numbers = np.frombuffer(content[: 8 * len(Own)].ljust(8 * len(Own), b"\0"), "<i8").tolist()
            if is_left:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                    if not name.startswith("."):
                        shared.add(Number.USED, -numbers[Own.RESERVED])
            elif not name.startswith("."):
                session = content[SESSION_AT : SESSION_AT + SESSION_BYTES].hex()
                live.append(LiveTable(name, tuple(numbers), session, content[PAGE_BYTES:]))
        finally:
            os.close(fd)
    return live


def smallest(
    tables: Sequence[LiveTable], max_bytes: int | None = None, ttl_s: float | None = None
) -> tuple[int | None, float | None]:
    """Returns the smallest capacity and time to live that the processes and the caller request; None: none does."""
    sizes = [table.numbers[Own.MAX_BYTES] for table in tables if table.numbers[Own.MAX_BYTES]]
    ttls = [table.numbers[Own.TTL_MS] / 1000 for table in tables if table.numbers[Own.TTL_MS]]
    sizes += [] if max_bytes is None else [max_bytes]
    ttls += [] if ttl_s is None else [ttl_s]  # 0: all that is not in use
    return min(sizes, default=None), min(ttls, default=None)


# The room that this process takes on a root of its host.
#
# Every put counts in one number that all processes share: it adds its bytes before it writes, and takes back at its
# end what it did not write. So the number is never too small, even if a process dies, and no put brings it above the
# limit. The collector keeps it below (``kvstore_gc.host``).


WAIT_S = 2.0
"""A put waits so long for a collector to make room,"""
START_S = 10.0
"""and so long for one that is being started."""
POLL_S = 0.002
FULL_NS = 1_000_000_000
"""A collector that finds nothing to evict says so again in less; what one has left by dying does not count for long."""
ANSWER_S = 0.25
"""Time for a collector that runs to say that nothing can be evicted."""
WAITS = "no space for this put: eviction has not caught up, or no collector runs; retry shortly"
DISK_FREE_BYTES = 16 << 20
"""On a disk that is full before the limit is reached, so much stays free."""
DISK_FREE_SHARE = 1 / 64
"""... or this share of a small disk."""


def limit_on(root: PosixRoot, max_bytes: int, shared: Shared) -> int:
    """Returns ``max_bytes``, or less if the disk has no room for so much. Raises OSError and the root's errors."""
    space = root.space()
    if space.free_bytes is None:
        return max_bytes
    kept = DISK_FREE_BYTES if space.total_bytes is None else min(DISK_FREE_BYTES, DISK_FREE_SHARE * space.total_bytes)
    if space.free_bytes - kept >= max_bytes:
        return max_bytes
    # What puts have reserved and not yet written counts as used, and is still free. Read in this order, so that
    # concurrent changes make the limit smaller.
    used = shared[Number.USED]
    reserved = sum(table.numbers[Own.RESERVED] for table in live_tables(root.path, shared))
    return max(1, min(max_bytes, used - reserved + (root.space().free_bytes or 0) - int(kept)))


@dataclass(slots=True)
class SpaceReservation:
    """Space for one put. Its owner releases it once nothing of the put is on its way any more.

    ``released`` receives its bytes; what was written of them counts as written. A put that is dropped half-way releases
    it as well.
    """

    size_bytes: int
    released: deque[int]
    settle: Callable[[], object] | None = None

    def release(self) -> None:
        """Gives back what was not written of it. Idempotent, and takes no lock, so that ``__del__`` may do it."""
        size_bytes, self.size_bytes = self.size_bytes, 0
        if size_bytes:
            self.released.append(size_bytes)
            if self.settle is not None:
                self.settle()

    __del__ = release

    def __enter__(self) -> SpaceReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class HostRoom:
    """Counts of one process. Thread-safe."""

    def __init__(
        self, shared: Shared, table: HoldTable, refused: Callable[[], None], wake: Callable[..., None]
    ) -> None:
        """``refused`` is called for each put that gets no room, ``wake`` at the first put, and ``at_once`` for each put
        while room is short.
        """
        self._shared = shared
        self._table = table
        self._refused = refused
        self._wake = wake
        self._lock = threading.Lock()
        self._reserved = 0
        """Bytes of puts that have begun."""
        self._unsettled = 0
        """Bytes that were written of them."""
        self._released: deque[int] = deque()
        self._put_max = self._waiting = 0
        self._is_closed = self._has_put = False
        self.written_bytes = 0
        """Bytes of the files that this process published."""

    @property
    def is_full(self) -> bool:
        """True if nothing can be evicted, because all that there is is held or pinned."""
        return 0 <= time.monotonic_ns() - self._shared[Number.FULL] < FULL_NS

    def check(self, size_bytes: int = 0) -> None:
        """Raises Overloaded for a put of more bytes than the store may have, and while nothing can be evicted."""
        limit = self._shared[Number.LIMIT]
        if limit and size_bytes > limit:
            self._refused()
            raise StoreFull(
                f"this put has {size(size_bytes)}, and the store has room for {size(limit)}: put less at a time, or "
                "give it a larger max_bytes or disk"
            )
        if limit and self.is_full and self._shared[Number.USED] + size_bytes > limit:
            self._refused()
            raise _full()

    def reserve(
        self, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None, wait_s: float = START_S
    ) -> SpaceReservation:
        """Reserves the room that a put may take; waits for it up to WAIT_S, at most ``wait_s``. Raises Overloaded then,
        or StoreFull if nothing can be evicted.

        ``missing_bytes`` is called before that, and returns how much of the put is not stored already.
        """
        if self._take(size_bytes):
            return SpaceReservation(size_bytes, self._released, self._settle)
        last_s = time.monotonic() + wait_s
        if missing_bytes is not None:
            size_bytes = missing_bytes()
        began_s, beats = time.monotonic(), self._shared[Number.BEATS]
        ends_s = min(last_s, began_s + START_S)
        self._wait_for(size_bytes)
        try:
            while not self._take(size_bytes):
                self._wake(at_once=True)
                now_s = time.monotonic()
                if ends_s > now_s + WAIT_S and self._shared[Number.BEATS] != beats:
                    ends_s = now_s + WAIT_S  # a collector runs
                if now_s > ends_s or (self.is_full and now_s > began_s + ANSWER_S):
                    self._refused()
                    raise _full() if self.is_full else Overloaded(WAITS)
                time.sleep(POLL_S)
        finally:
            self._wait_for(-size_bytes)
        return SpaceReservation(size_bytes, self._released, self._settle)

    def wrote(self, size_bytes: int) -> None:
        """Counts a published file."""
        with self._lock:
            self.written_bytes += size_bytes
            self._unsettled += size_bytes
            self._publish()
        self._settle()

    def removed(self, size_bytes: int) -> None:
        """Counts a deleted file."""
        self._shared.add(Number.USED, -size_bytes)
        self._shared.add(Number.DELETED, size_bytes)

    def refusal(self, full: DiskFull) -> Overloaded:
        """Has the collector make room on a full disk; returns the caller's error."""
        self._wake(at_once=True)
        return StoreFull(f"{full.said}; the store makes room if it has a limit (max_bytes=): put again in a moment")

    def close(self) -> None:
        """Gives back all that was reserved and not written, once nothing is written any more."""
        self._settle()
        with self._lock:
            self._is_closed = True
            written, self._unsettled = self._unsettled, 0
            self._shared.add(Number.WRITTEN, written)
            self._shared.add(Number.USED, written - self._reserved)
            self._reserved = 0

    def _wait_for(self, size_bytes: int) -> None:
        """Publishes the room that a put waits for, and that it no longer does."""
        with self._lock:
            self._waiting += size_bytes
            self._table.numbers[Own.WAITING] = self._waiting
        self._settle()  # a put that ended while we had the lock left that to us

    def _take(self, size_bytes: int) -> bool:
        shared = self._shared
        self._settle()
        with self._lock:
            used, limit = shared[Number.USED] + size_bytes, shared[Number.LIMIT]
            is_taken = not limit or used <= limit  # others would count what is added only to be taken back
            if is_taken:
                # First in the table: a process that sees it in the sum then finds it there.
                self._reserved += size_bytes
                self._publish()
                shared.add(Number.BEGUN, size_bytes)
                used = shared.add(Number.USED, size_bytes)
                is_taken = not limit or used <= limit
                if not is_taken:
                    shared.add(Number.USED, -size_bytes)
                    self._reserved -= size_bytes
                    self._publish()
            if is_taken and size_bytes > self._put_max:
                self._table.numbers[Own.PUT_MAX] = self._put_max = size_bytes
        self._settle()  # a put that ended while we had the lock left that to us
        is_short = 0 < shared[Number.WAKES_AT] < used
        if is_taken and (is_short or not self._has_put):
            self._has_put = True
            self._wake(at_once=is_short)
        return is_taken

    def _settle(self) -> None:
        """Counts puts that have ended: what they wrote stays, what else they had reserved is free."""
        if self._is_closed:
            return
        while (self._released or self._unsettled > self._reserved) and self._lock.acquire(blocking=False):
            try:
                left = 0
                while self._released:
                    left += self._released.popleft()
                written, self._unsettled = self._unsettled, 0
                self._shared.add(Number.WRITTEN, written)
                self._shared.add(Number.USED, written - left)
                self._reserved -= left
                self._publish()
            finally:
                self._lock.release()

    def _publish(self) -> None:
        """Publishes how much is free again if this process ends now."""
        self._table.numbers[Own.RESERVED] = max(0, self._reserved - self._unsettled)


def _full() -> StoreFull:
    return StoreFull(
        "the store is full, and nothing can be evicted at the moment, because it is held or pinned: release what is "
        "not needed, and put again later"
    )
