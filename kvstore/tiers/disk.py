"""The local disk below a node's memory: images in files, in a folder of this node alone, bounded in bytes.

A cache of a cache: nothing is synced, losing it costs nothing, and every failure of the disk is a miss.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.census.selection import NOTHING, ClearOrder
from kvstore.codec.encodings import Encodings, NotDecodable
from kvstore.core import recency
from kvstore.core.address import Address
from kvstore.core.buffers import BufferLoan, byte_length
from kvstore.core.clock import Clock, Ids
from kvstore.core.executor import Deadline, moved_on
from kvstore.core.metrics import Counters, NodeCount, TierName
from kvstore.core.namespace import NamespaceId
from kvstore.core.process import FORGOTTEN_BY_CHILDREN
from kvstore.core.recency import DEFAULT, QUANTUM_S, Hints
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.format.header import Damage, Damaged, Expected, Header, IdentityKind, decode
from kvstore.format.keyset import ChunkIdentity, KeySet
from kvstore.format.places import Name
from kvstore.root.identity import FILE_SYSTEMS_OWN, FORMAT_BYTES_MAX, TOP, publish_small, read_small
from kvstore.root.inspect import Inspector
from kvstore.root.interface import Root, Stat
from kvstore.root.posix import FULL_ERRORS, REFUSED_ERRORS, PosixRoot
from kvstore.tiers.inventory import DROP_COUNT, TierEntry, TierInventory

# The folder of a local disk tier: locked by one node at a time, and never mistaken for a root, nor a root for it.


FORMAT_NAME = "kvstore-disk"
"""The name in ``FORMAT``. It keeps this folder from being opened as a root, and this module refuses other names."""
VERSION = 1
RECORD = "record"
"""Names the root of the files and the clears that were carried out here. Without it no file is taken in."""
SHARD_BITS = 8
LOCK = "lock"

_OURS_BEFORE_FORMAT = frozenset({LOCK, places.STAGING}) | FILE_SYSTEMS_OWN
"""Names that a folder may hold before it becomes a disk tier: a node killed while making one leaves some."""


class DiskFolder:
    """The folder at ``path``; ``make_root`` gives access to its files."""

    def __init__(self, path: str, clock: Clock, ids: Ids, make_root: Callable[[str], Root] = PosixRoot) -> None:
        self.path = os.path.abspath(path)
        self._clock = clock
        self._ids = ids
        self._make_root = make_root
        self._lock_fd = -1

    def open(self) -> Root:
        """Makes the folder if it is missing, locks it, and returns access to its files, which are then this node's.

        Raises InvalidRequest if another node has it, or if it is a root or holds anything else; PermissionDenied,
        Overloaded, Unavailable.
        """
        self._refuse_inside()
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        except OSError as cause:
            raise _refusal(self.path, "could not be made", cause) from cause
        root = self._make_root(self.path)
        is_marked = self._is_marked(root)  # check first: leave no lock file in another program's folder
        self._lock()
        try:
            if not is_marked and not self._is_marked(root):
                self._mark(root)
        except BaseException:
            self.unlock()
            raise
        return root

    def _refuse_inside(self) -> None:
        """Raises InvalidRequest if the folder lies within a root or another disk tier, where it would be foreign."""
        for above in Path(self.path).parents:
            with suppress(OSError), open(above / places.FORMAT, "rb") as file:
                if b'"format": "kvstore' in file.read(FORMAT_BYTES_MAX):
                    raise InvalidRequest(
                        f"disk tier {self.path} lies within {above}, which is a root or another disk tier: "
                        "give a folder outside of it"
                    )

    def unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the file too
            os.close(fd)

    def forget(self) -> None:
        """Closes the lock in a forked child, which would keep it."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> None:
        path = f"{self.path}/{LOCK}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as cause:
            raise _refusal(path, "could not be opened", cause) from cause
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            os.close(fd)
            if cause.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InvalidRequest(
                    f"disk tier {self.path} is in use by another node: give each node of a host a folder of its own"
                ) from cause
            raise _refusal(path, "could not be locked", cause) from cause
        self._lock_fd = fd
        FORGOTTEN_BY_CHILDREN.add(self)

    def _is_marked(self, root: Root) -> bool:
        """True if the folder is a disk tier; False if it may become one. Raises InvalidRequest otherwise."""
        content = read_small(root, places.FORMAT, FORMAT_BYTES_MAX)
        if content is None:
            for entry in root.list(TOP):
                if entry.name not in _OURS_BEFORE_FORMAT and entry.name != places.FORMAT:
                    raise InvalidRequest(
                        f"disk tier {self.path} holds {entry.name!r}, which is not of a disk tier: give an empty folder"
                    )
            return False
        try:
            fields = parse_json(content)
            name, version = fields["format"], fields["version"]
        except (ValueError, KeyError, TypeError):
            name, version = "", 0
        if name != FORMAT_NAME:
            raise InvalidRequest(
                f"disk tier {self.path} is a root, or something else: its FORMAT begins with {content[:60]!r}; "
                "give a folder that no root is in"
            )
        if version != VERSION:
            raise InvalidRequest(
                f"disk tier {self.path} has version {version!r}, this kvstore knows version {VERSION}: "
                "give another folder, or empty this one (it is a cache)"
            )
        return True

    def _mark(self, root: Root) -> None:
        content = json.dumps({"format": FORMAT_NAME, "version": VERSION}).encode() + b"\n"
        # The only synced file: torn by a crash of the host, it would keep the tier from being opened again.
        publish_small(root, places.FORMAT, content, ids=self._ids, clock=self._clock)


def _refusal(path: str, what: str, cause: OSError) -> KVStoreError:
    said = f"disk tier {path} {what}: {cause.strerror or cause}"
    if cause.errno in REFUSED_ERRORS:
        return PermissionDenied(f"{said}; give a folder that this user may write to")
    if cause.errno in (errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EISDIR, errno.ENOTSUP, errno.ENOLCK):
        return InvalidRequest(f"{said}; give a folder on a local disk")
    return Unavailable(f"{said}; check the disk")


# Leaves a failing local disk alone: for a while after repeated failures, and while reads hang.
#
# A dead disk must cost the node neither its threads nor a wait in each request.


FAILURES_MAX = 3
"""Failures in a row before the disk is left alone for ``PAUSE_S``; each further one in a row starts another pause."""
PAUSE_S = 30.0
READERS_MAX = 8
"""Threads that a hanging disk can block: half of them."""
WAIT_S = 0.25
"""The longest that a read waits for another one to end."""
STALL_S = 2.0
"""A read of one file that takes longer shows that the disk hangs; no further read begins until it returns."""


class Pause:
    """Is on for ``PAUSE_S`` after ``FAILURES_MAX`` failures in a row."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures_count = 0
        self._until_s = -1.0

    @property
    def is_on(self) -> bool:
        return self._clock.monotonic_s() < self._until_s

    def failed(self) -> None:
        self._failures_count += 1
        if self._failures_count >= FAILURES_MAX:
            self._until_s = self._clock.monotonic_s() + PAUSE_S

    def succeeded(self) -> None:
        self._failures_count = 0


class Readers:
    """The threads that read from the disk at this moment, at most ``READERS_MAX``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._since_s: dict[int, float] = {}

    @property
    def is_stuck(self) -> bool:
        """True if a read has not returned for ``STALL_S``."""
        limit = self._clock.monotonic_s() - STALL_S
        with self._changed:
            return any(since < limit for since in self._since_s.values())

    def enter(self, deadline: Deadline) -> bool:
        """Begins a read in this thread; False if it must not begin, because the disk hangs or is too busy."""
        if self.is_stuck:
            return False
        with self._changed:
            if not self._changed.wait_for(self._has_room, min(WAIT_S, deadline.left_s())):
                return False
            self._since_s[threading.get_ident()] = self._clock.monotonic_s()
        return True

    def moved_on(self) -> None:
        """Notes that this thread has read one file and goes on with the next."""
        with self._changed:
            self._since_s[threading.get_ident()] = self._clock.monotonic_s()

    def leave(self) -> None:
        with self._changed:
            del self._since_s[threading.get_ident()]
            self._changed.notify()

    def _has_room(self) -> bool:
        return len(self._since_s) < READERS_MAX


# The contents of a local disk tier, decided under one lock and done to files outside of it.
#
# The bound holds at each moment: a file's room is taken before its first byte is written, and given back after the
# file is removed. Dropped entries stay referenced until then.


BLOCK_BYTES = 4096
"""The block size, unless the file system reports another."""


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A file with the name of a chunk, as a listing shows it."""

    mtime_ns: int
    size_bytes: int
    address: Address
    namespace: NamespaceId


class FileRoom:
    """Room for files of at most ``size_bytes`` in all, as a file system counts them. Not thread-safe.

    ``take`` returns the charge of the file as its place, so that nothing needs to remember the charge of each file.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.block_bytes = BLOCK_BYTES

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - self.held_bytes

    def charge(self, size_bytes: int) -> int:
        """Returns what a file of that size takes: whole blocks, and one more for the file system's map of a fragmented
        file, which ``st_blocks`` counts too.
        """
        return (-(-size_bytes // self.block_bytes) + 1) * self.block_bytes

    def take(self, size_bytes: int) -> int | None:
        """Charges a file; None if it would pass the bound."""
        charged = self.charge(size_bytes)
        if charged > self.free_bytes:
            return None
        self.held_bytes += charged
        return charged

    def give(self, offset: int) -> None:
        assert 0 < offset <= self.held_bytes
        self.held_bytes -= offset


def name_of(chunk: ChunkIdentity | TierEntry) -> Name:
    """Returns the name of its file."""
    return places.chunk(chunk.address, NamespaceId(chunk.namespace[: places.NAMESPACE_ID_BYTES]), SHARD_BITS)


def _is_of(header: Header, found: DiskFile) -> bool:
    return header.address == found.address and header.namespace[: places.NAMESPACE_ID_BYTES] == found.namespace


log = logging.getLogger(__name__)


class DiskTier:
    """Implements ``Tier``. Thread-safe. ``open`` it first; it is empty until ``refill`` has taken in the files."""

    name: TierName = "disk"

    def __init__(
        self,
        path: str,
        size_bytes: int,
        counters: Counters,
        clock: Clock,
        ids: Ids,
        *,
        encodings: Encodings | None = None,
        make_root: Callable[[str], Root] = PosixRoot,
        root_id: bytes = b"",
    ) -> None:
        self._folder = DiskFolder(path, clock, ids, make_root)
        self._root_id = root_id.hex() or "none"
        self._encodings = encodings or Encodings(None, counters, ids)
        self._counters = counters
        self._clock = clock
        self._session = ids.fresh()
        self._numbers = itertools.count()
        self._reads, self._writes = Pause(clock), Pause(clock)
        self._readers = Readers(clock)
        self._recording = threading.Lock()  # one writes the record at a time
        self._changed = threading.Condition()  # guards what follows; nothing under it waits for the disk
        self._is_open = False
        self._users_count = 0
        """Running calls that use the folder, and the refill."""
        self._room = FileRoom(size_bytes)
        self._inventory = TierInventory(self._room)
        self._is_whole = False
        """True once all files of the folder are taken in: before that nothing is written."""
        self._refused: set[NamespaceId] = set()
        """Until then: files of these namespaces are not taken in."""
        self._refuses_all = False
        self._unread: set[NamespaceId] = set()
        """Those of files that could be neither taken in nor removed."""
        self._known: set[str] | None = None
        """The orders that were carried out here before the start; None: unknown."""
        self._obeyed: set[str] = set()
        """The names of the orders to clear that were carried out here."""
        self._unsettled = 0
        """Removals that go on or failed: until they are done, the files are not what the record says."""
        self._standing = NOTHING

    def open(self) -> None:
        """Locks the folder.

        Raises InvalidRequest if another node has it, or if it holds anything but a disk tier; PermissionDenied,
        Overloaded, Unavailable.
        """
        self._root = self._folder.open()
        with suppress(OSError):
            self._room.block_bytes = os.statvfs(self._folder.path).f_frsize
        self._known = self._recorded()  # now: a clear removes the record while it removes files
        self._is_open = True

    def refill(self, cleared: Sequence[ClearOrder] = ()) -> None:
        """Begins to take in the folder's files, except those that orders named and that it still had. Call it once."""
        with self._changed:
            if self._is_open:
                self._users_count += 1
                work = partial(self._take_all, tuple(cleared))
                threading.Thread(target=work, name="kvstore-disk-refill", daemon=True).start()

    def leading(self, wanted: KeySet, first: int) -> int:
        """Returns how many consecutive chunks from index ``first`` on are there. No I/O."""
        if not self._is_open or self._reads.is_on or self._readers.is_stuck:
            return 0
        with self._changed:
            is_forbidden = self._standing.means(wanted.namespace.digest)
            return 0 if is_forbidden else self._inventory.leading(wanted.addresses, first)

    def fetch(
        self, wanted: KeySet, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """Reads whole files; True for each that gave exactly its image. Verifies nothing but encryption (rule I1).

        May block on the disk for longer than ``deadline``: called on threads. Never raises KVStoreError.
        """
        came = [False] * len(indexes)
        with self._inside() as is_open:
            if not is_open or self._standing.means(wanted.namespace.digest) or not self._readers.enter(deadline):
                return came
            try:
                for at, (index, image) in enumerate(zip(indexes, images, strict=True)):
                    if self._reads.is_on or deadline.passed:
                        break
                    moved_on()
                    self._readers.moved_on()
                    came[at] = self._fetch(wanted, index, image)
            finally:
                self._readers.leave()
        self._counters.add(NodeCount.DISK_HITS, sum(came))
        self._counters.add(
            NodeCount.DISK_BYTES, sum(len(image) for image, whole in zip(images, came, strict=True) if whole)
        )
        return came

    def add(self, place: ChunkIdentity, image: memoryview, hints: Hints = DEFAULT) -> bool:
        """Writes an image that memory gives up; False if it is already there, there is no room, or the disk refuses.

        Blocks on the disk, so call it from a thread that no caller waits for. Never raises KVStoreError.
        """
        with self._inside() as is_open:
            for is_last in (False, True):
                if not is_open or self._writes.is_on:
                    break
                try:
                    return self._add(place, image, hints)
                except KVStoreError as error:
                    # Other programs fill the disk too. Then our files turn over in less room, instead of growing stale.
                    if not is_last and _is_full(error) and self._make_room(place, len(image), even_if_free=True):
                        continue
                    self._failed(self._writes, error)
                    break
        return False

    def retire(self, wanted: KeySet, count: int) -> None:
        """Makes those of the first ``count`` chunks that are here the first to go, until they are read again."""
        with self._changed:
            self._inventory.retire(wanted.addresses[:count])

    def drop(self, address: Address) -> bool:
        with self._inside() as is_open:
            entry = self._refer(address) if is_open else None
            if entry is None:
                return False
            self._remove(entry)
        return True

    def damaged(self, wanted: KeySet, index: int) -> None:
        """Removes a chunk, because what ``fetch`` gave for it was not right."""
        if self.drop(wanted.addresses[index]):
            self._counters.add(NodeCount.DISK_DAMAGED)

    def forbid(self, standing: ClearOrder) -> None:
        """Sets what must neither come here nor be read from now on (rule P5)."""
        with self._changed:
            self._standing = standing

    def drop_ordered(self, orders: Sequence[ClearOrder]) -> None:
        """Drops all chunks that orders name; a thread removes their files. Never raises KVStoreError."""
        meant = ClearOrder.of_all(orders)
        with self._changed:
            if not meant.namespaces or not self._is_open:
                return
            if not self._is_whole:
                self._refused |= meant.namespaces  # before the entries are listed: the refill checks each file
            entries = self._inventory.entries()
            self._unsettled += 1 + bool(meant.namespaces & self._unread)
            self._users_count += 1
        dropped: list[TierEntry] = []
        for start in range(0, len(entries), DROP_COUNT):
            with self._changed:
                for entry in entries[start : start + DROP_COUNT]:
                    if meant.means(entry.namespace) and not entry.is_gone:
                        if entry.is_ready:  # otherwise ``_add`` finds it dropped, and removes its file
                            self._inventory.refer(entry)
                            dropped.append(entry)
                        self._inventory.drop(entry)
        remove = partial(self._remove_all, dropped, {order.name for order in orders})
        try:
            threading.Thread(target=remove, name="kvstore-disk-clear", daemon=True).start()
        except RuntimeError:  # no more threads
            remove()

    def _remove_all(self, dropped: Sequence[TierEntry], names: set[str]) -> None:
        """Removes the files of cleared chunks, until the tier is closed."""
        try:
            self._keep_record()
            left_count = sum(not self._is_open or not self._remove_files(entry, name_of(entry)) for entry in dropped)
            if not left_count:
                with self._changed:
                    self._unsettled -= 1
                    self._obeyed |= names
                self._keep_record()
        finally:
            self._end_use()

    def stats(self) -> dict[str, int | float]:
        """Returns disk_entries; disk_held_bytes, as the file system counts them; disk_bytes_max; disk_refilling, which
        is 1 until all files of the folder are taken in.
        """
        with self._changed:
            return {
                "disk_entries": self._inventory.entries_count,
                "disk_held_bytes": self._room.held_bytes,
                "disk_bytes_max": self._room.size_bytes,
                "disk_refilling": int(not self._is_whole),
            }

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the thread, and unlocks the folder after its last use. Idempotent."""
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            if not self._users_count:
                self._folder.unlock()
            # A thread that hangs in the disk keeps the folder locked: it may still write there.
            elif not self._changed.wait_for(lambda: not self._users_count, timeout_s):
                log.warning("disk.in_use %s: it stays locked until the disk answers", self._folder.path)

    # What the folder has at the start is taken in, in its order.

    def _take_all(self, cleared: Sequence[ClearOrder]) -> None:
        """Takes in all files with names of chunks; removes files with other names, and cut-off writes.

        An error of a listing ends it: then nothing is written until the next start.
        """
        known, names, is_certain = self._known, {order.name for order in cleared}, True
        with self._changed:
            self._refuses_all = known is None
            for order in cleared:
                self._refused |= order.namespaces if order.name not in (known or ()) else frozenset()
        try:
            for session in self._names(places.STAGING):
                folder = Name(f"{places.STAGING}/{session}")
                for cut in self._names(folder):
                    self._root.remove(Name(f"{folder}/{cut}"))
                self._root.remove_folder(folder)
            inspector = Inspector(self._root, verify_payload=False)
            for shard in self._names(places.CHUNKS):
                for entry in list(self._root.list(Name(f"{places.CHUNKS}/{shard}"))):
                    if self._is_open and entry.stat is not None:
                        name = Name(f"{places.CHUNKS}/{shard}/{entry.name}")
                        is_certain = self._take(inspector, name, entry.name, entry.stat) and is_certain
            with self._changed:
                if self._is_open:
                    self._is_whole = True
                    self._obeyed |= names
                    self._unsettled += not is_certain
                    self._refused.clear()
            self._keep_record()
        except KVStoreError as error:
            log.warning("disk.not_read %s: nothing is written to it until the next start: %s", self._folder.path, error)
        finally:
            self._end_use()

    def _names(self, folder: Name) -> list[str]:
        return [entry.name for entry in self._root.list(folder)] if self._is_open else []

    def _take(self, inspector: Inspector, name: Name, file_name: str, stat: Stat) -> bool:
        """Takes in a file, or removes it; False if it has to go, and stays."""
        chunk = places.parse_chunk(file_name)
        try:
            if chunk is not None and places.chunk(*chunk, SHARD_BITS) == name:
                found, verdict = DiskFile(stat.mtime_ns, stat.size_bytes, *chunk), inspector.look(name)
                if isinstance(verdict, Header) and _is_of(verdict, found):
                    header = self._opened(name, verdict)
                    if header is not None and self._admit(found, header):
                        return True
            self._root.remove(name)
        except KVStoreError as error:
            self._failed(self._reads, error)
            with self._changed:
                self._room.held_bytes += self._room.charge(stat.size_bytes)
                if chunk is not None:
                    self._unread.add(chunk[1])
                    return not self._refuses_all and chunk[1] not in self._refused
        return True

    def _admit(self, found: DiskFile, header: Header) -> bool:
        """Takes in a file of the folder; False if it has to go."""
        was = recency.decode(found.mtime_ns, QUANTUM_S)
        place = ChunkIdentity(header.namespace, header.address, header.parent)
        with self._changed:
            used_s = min(float(was.last_use_s), self._clock.now_s())
            is_cleared = found.namespace in self._refused or self._standing.means(found.namespace)
            if self._refuses_all or is_cleared:
                return False
            if self._room.charge(found.size_bytes) > self._room.free_bytes:
                return False
            entry = self._inventory.claim(place, found.size_bytes, used_s, was.hints)
            if entry is None:
                return False
            self._inventory.used([entry] * was.uses, used_s)
            self._inventory.ready(entry)
            self._inventory.unrefer(entry)
        return True

    def _opened(self, name: Name, header: Header) -> Header | None:
        """Returns a header whose tokens can be read; None if it is encrypted and its key is no longer known."""
        if not header.encoding:
            return header
        reader = self._root.open(name)
        if reader is None:
            return None
        with reader:
            try:
                opened = self._encodings.header_of(reader)
            except (NotDecodable, Damaged):
                return None
        return opened and opened[0]

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Wraps every use of the folder; yields True if it may be used."""
        with self._changed:
            is_open = self._is_open
            self._users_count += is_open
        try:
            yield is_open
        finally:
            if is_open:
                self._end_use()

    def _end_use(self) -> None:
        with self._changed:
            self._users_count -= 1
            if not self._users_count and not self._is_open:
                self._folder.unlock()
                self._changed.notify_all()

    def _refer(self, address: Address) -> TierEntry | None:
        """Returns the entry, whose room is not given back until ``_unrefer``; None if there is none."""
        with self._changed:
            entry = self._inventory.find(address)
            if entry is not None:
                self._inventory.refer(entry)
            return entry

    def _unrefer(self, entry: TierEntry, *, used: bool) -> None:
        """Ends ``_refer``; ``used`` says whether the entry was used."""
        with self._changed:
            if used:
                # Wall time: entries taken in at the start have their last uses from the files' times.
                self._inventory.used([entry], self._clock.now_s())
            self._inventory.unrefer(entry)

    def _fetch(self, wanted: KeySet, index: int, image: memoryview) -> bool:
        entry = self._refer(wanted.addresses[index])
        if entry is None:
            return False
        # A file of another size is a block that was put with that size, or encrypted.
        whole, stays = False, entry.size_bytes != len(image) and not self._encodings.has_keys
        try:
            if not stays:
                found = self._read(entry, wanted.expected(index), image)
                whole, stays = found is True, found is not False
                self._reads.succeeded()
        except Overloaded as error:
            self._failed(self._reads, error)
            stays = True  # too few descriptors or too little memory: the file may be right
        except KVStoreError as error:
            self._failed(self._reads, error)
        if stays:
            self._unrefer(entry, used=whole)
        else:
            self._remove(entry)
        return whole

    def _read(self, entry: TierEntry, expected: Expected, image: memoryview) -> bool | None:
        """Fills the image from the file; True if the file gave exactly the image, False if it is missing or wrong.

        None if the file is right but not usable here: it was put with another size, or cannot be decrypted on this
        node.
        """
        name = name_of(entry)
        reader = self._root.open(name)
        if reader is None:
            return False
        with reader:
            mtime_ns = reader.stat.mtime_ns
            try:
                plain = reader if reader.stat.size_bytes == len(image) else self._encodings.reader(reader, expected)
                if plain is None:
                    return None if entry.size_bytes != len(image) else False
                if plain.read([image], 0, BufferLoan()) != len(image):
                    return False
            except NotDecodable:
                return None
            except Damaged as damaged:
                return None if expected.kind is IdentityKind.BLOCK and damaged.damage is Damage.GEOMETRY else False
        stamp_ns = recency.renewed_ns(mtime_ns, self._quantum(), QUANTUM_S, recency.decode(mtime_ns, QUANTUM_S).depth)
        if stamp_ns is not None:
            with suppress(KVStoreError):  # the bytes are right, even if its time is not renewed
                self._root.touch(name, stamp_ns)
        return True

    def _add(self, place: ChunkIdentity, image: memoryview, hints: Hints) -> bool:
        header = _header_of(place, image)
        if header is None:
            return False
        pieces = self._encodings.pieces_of_image(header, image)
        if pieces is None:
            return False
        name, size_bytes = name_of(place), byte_length(pieces)
        # A file without an entry has not been taken in yet, or is about to be removed.
        with self._changed:
            is_here = self._inventory.find(place.address) is not None
        if is_here or self._root.stat(name) is not None or not self._make_room(place, size_bytes):
            return False
        with self._changed:
            # Without room for it, never evict: no file would be removed.
            may_come = self._room.charge(size_bytes) <= self._room.free_bytes
            may_come = may_come and not self._standing.means(header.namespace)  # an order may have come meanwhile
            claimed = self._inventory.claim(place, size_bytes, self._clock.now_s(), hints) if may_come else None
        if claimed is None:
            return False
        staged = places.staged(self._session, next(self._numbers))
        stamp_ns = recency.stamp_ns(self._quantum(), header.depth, hints)
        try:
            with self._counters.timed("disk", "write") as timed:
                timed.size_bytes = size_bytes
                self._root.stage(staged, pieces, stamp_ns=stamp_ns, durable=False)
                won = self._root.publish(staged, name, durable=False)
        except BaseException:
            self._remove(claimed, staged, name)
            raise
        if not won:
            self._remove(claimed)
            return False
        with self._changed:
            is_kept = self._inventory.ready(claimed)
            if is_kept:
                self._inventory.unrefer(claimed)
        if not is_kept:  # cleared while it was written
            self._remove_files(claimed, name)
            return False
        self._writes.succeeded()
        self._counters.add(NodeCount.DISK_WRITES)
        self._counters.add(NodeCount.DISK_WRITE_BYTES, size_bytes)
        return True

    def _make_room(self, place: ChunkIdentity, size_bytes: int, *, even_if_free: bool = False) -> bool:
        """Evicts the least useful entries, as many as a file of that size needs; False if it may not.

        Their room is free once their files are removed, and they are no longer referred to. ``even_if_free``: the disk
        has less room than this tier counts.
        """
        with self._changed:
            charged = self._room.charge(size_bytes)
            if not self._is_whole or charged > self._room.size_bytes:
                return False
            lacking = charged if even_if_free else charged - self._room.free_bytes
            victims = self._victims(lacking, place.parent) if lacking > 0 else []
            for victim in victims:
                self._inventory.refer(victim)
                self._inventory.drop(victim)
            self._counters.add(NodeCount.DISK_EVICTED, len(victims))
        for victim in victims:
            self._remove_files(victim, name_of(victim))
        return lacking <= 0 or bool(victims)

    def _victims(self, lacking: int, parent: Address) -> list[TierEntry]:
        """Returns the entries that go first, just enough to free ``lacking`` bytes, never the parent of the new file;
        empty if there is not enough. Under the lock.
        """
        kept = self._inventory.find(parent)
        if kept is not None:
            self._inventory.refer(kept)
        victims: list[TierEntry] = []
        for entry in self._inventory.victims(lacking):
            if lacking > 0:
                victims.append(entry)
                lacking -= self._room.charge(entry.size_bytes)
        if kept is not None:
            self._inventory.unrefer(kept)
        return victims if lacking <= 0 else []

    def _remove(self, entry: TierEntry, *names: Name) -> None:
        """Takes away an entry that the caller refers to, and its file, or the files of these names."""
        with self._changed:
            self._inventory.drop(entry)
        self._remove_files(entry, *(names or (name_of(entry),)))

    def _remove_files(self, entry: TierEntry, *names: Name) -> bool:
        """Removes the files of a dropped entry. Those that the disk refuses to remove keep its room until the next
        start; False then.
        """
        try:
            for name in names:
                self._root.remove(name)
        except KVStoreError as error:
            self._failed(self._writes, error)
            return False
        self._unrefer(entry, used=False)
        return True

    def _recorded(self) -> set[str] | None:
        """Returns the names of the orders that were carried out here; None if the files may be of another root, or
        what a clear left.
        """
        try:
            with open(f"{self._folder.path}/{RECORD}") as file:
                root, *names = file.read().split()
        except (OSError, ValueError):
            return None
        return set(names) if root == self._root_id else None

    def _keep_record(self) -> None:
        """Writes the record if it would be true; otherwise there is none, and the next start takes in no file."""
        path = f"{self._folder.path}/{RECORD}"
        with self._recording:
            with self._changed:
                if not self._is_open:
                    return  # the folder may be another node's by now
                is_true, names = self._is_whole and not self._unsettled, sorted(self._obeyed)
            try:
                with suppress(FileNotFoundError):
                    os.unlink(path)  # first: the old one must not outlive a failure
                if is_true:
                    with open(f"{path}.new", "w") as file:
                        file.write("\n".join([self._root_id, *names]))
                    os.rename(f"{path}.new", path)
            except OSError as error:
                self._failed(self._writes, Unavailable(f"{path} could not be written: {error}"))

    def _failed(self, pause: Pause, error: KVStoreError) -> None:
        self._counters.add(NodeCount.DISK_FAILED)
        log.debug("disk.failed %s", error)
        pause.failed()

    def _quantum(self) -> int:
        return recency.quantum_of(self._clock.now_s(), QUANTUM_S)


def _header_of(place: ChunkIdentity, image: memoryview) -> Header | None:
    """The header of an image; None where it is not right for this chunk."""
    try:
        header = decode(image)
    except Damaged:
        return None
    if header.address != place.address or header.file_bytes != len(image):
        return None  # of memory that went wrong: it would be removed at the next start
    return header


def _is_full(error: KVStoreError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL_ERRORS
