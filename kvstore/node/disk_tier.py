"""The local disk below a node's memory: images in files, in a folder of this node alone, bounded in bytes.

A cache of a cache: nothing is synced, losing it costs nothing, and every failure of the disk is a miss. This module
does the I/O; the shelf decides what the tier holds.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvstore import recency
from kvstore.address import Address
from kvstore.bounded import within
from kvstore.buffers import Borrowed, byte_length
from kvstore.census.selection import ClearOrder, Standing
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError, Overloaded
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, Damage, Damaged, Expected, Header, Kind, decode, incarnation_at
from kvstore.format.places import Name
from kvstore.hints import DEFAULT, Hints
from kvstore.memory.inventory import DEFAULT_POLICY, POLICIES, Entry, Place
from kvstore.namespace import NamespaceDigest
from kvstore.node.counters import Counters, TierName
from kvstore.node.disk_folder import DiskFolder
from kvstore.node.disk_gate import Pause, Readers
from kvstore.node.disk_refill import Refill
from kvstore.node.disk_shelf import DiskShelf, name_of
from kvstore.node.encoded import Encodings, NotDecodable
from kvstore.node.lanes import Deadline, moved_on
from kvstore.node.wanted import Wanted, expected_of
from kvstore.recency import QUANTUM_S
from kvstore.root.interface import Root
from kvstore.root.posix import FULL_ERRORS, PosixRoot
from kvstore.sources import Clock, Ids

log = logging.getLogger(__name__)

CLEAR_S = 10.0
SWEEP_MAX = 64
"""Files removed by one call: a caller that drops one chunk must not also remove all files of a cleared namespace."""


class DiskTier:
    """Implements ``Tier``. Thread-safe. ``open`` it first; it is empty until the folder's files are taken in."""

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
    ) -> None:
        self._folder = DiskFolder(path, clock, ids, make_root)
        self._encodings = encodings or Encodings(None, counters, ids)
        self._counters = counters
        self._clock = clock
        self._session = ids.fresh()
        self._numbers = itertools.count()
        self._shelf = DiskShelf(size_bytes, POLICIES[DEFAULT_POLICY](), counters, clock)
        self._reads, self._writes = Pause(clock), Pause(clock)
        self._readers = Readers(clock)
        self._changed = threading.Condition()
        self._is_open = False
        self._users_count = 0
        """Running calls that use the folder, and the refill."""

    def open(self) -> None:
        """Locks the folder and begins to take in its files.

        Raises InvalidRequest if another node has it, or if it holds anything but a disk tier; PermissionDenied,
        Overloaded, Unavailable.
        """
        self._root = self._folder.open()
        self._shelf.set_block_bytes(self._folder.block_bytes)
        self._refill = Refill(
            self._root, self._shelf, self._encodings, lambda error: self._failed(self._reads, error), self._end_use
        )
        self._is_open = True
        self._users_count = 1
        self._refill.start()

    def leading(self, wanted: Wanted, first: int) -> int:
        """Returns how many consecutive chunks from index ``first`` on are there. No I/O."""
        if not self._is_open or self._reads.is_on or self._readers.is_stuck:
            return 0
        return self._shelf.leading(wanted.packed_addresses, first)

    def holders(self, wanted: Wanted, index: int) -> tuple[str, ...]:
        """See ``Tier``."""
        return (self.name,) if self.leading(wanted, index) else ()

    def fetch(
        self, wanted: Wanted, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """Reads whole files; True for each that gave exactly its image. Verifies nothing but encryption (rule I1).

        May block on the disk for longer than ``deadline``: called on lanes. Never raises KVStoreError.
        """
        came = [False] * len(indexes)
        with self._inside() as is_open:
            if not is_open or not self._readers.enter(deadline):
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

    def add(self, place: Place, image: memoryview, hints: Hints = DEFAULT) -> bool:
        """Writes an image that memory gives up; False if it is already there, there is no room, or the disk refuses.

        Blocks on the disk: called by a thread that nobody waits for. Never raises KVStoreError.
        """
        with self._inside() as is_open:
            for is_last in (False, True):
                if not is_open or self._writes.is_on:
                    break
                try:
                    return self._add(place, image, hints)
                except KVStoreError as error:
                    # Other programs fill the disk too. Then our files turn over in less room, instead of growing stale.
                    if not is_last and _is_full(error) and self._shelf.make_room(place, len(image), even_if_free=True):
                        self._sweep()
                        continue
                    self._failed(self._writes, error)
                    break
        return False

    def retire(self, wanted: Wanted, count: int) -> None:
        """Makes those of the first ``count`` chunks that are here the first to go, until they are read again."""
        self._shelf.retire(wanted.addresses[:count])

    def drop(self, address: Address) -> bool:
        """Removes a chunk; False if there is none."""
        with self._inside() as is_open:
            entry = self._shelf.refer(address) if is_open else None
            if entry is None:
                return False
            self._remove(entry)
        return True

    def damaged(self, wanted: Wanted, index: int) -> None:
        """Removes a chunk, because what ``fetch`` gave for it was not right."""
        if self.drop(wanted.addresses[index]):
            self._counters.add(NodeCount.DISK_DAMAGED)

    def drop_namespace(self, digest: bytes) -> None:
        """Removes all chunks of a namespace: first none of them is found any more, then the files go.

        Waits at most ``CLEAR_S`` for the files. Those left by then are removed in the background; a file that still
        exists when the process ends is found again at the next start.
        """
        with self._inside() as is_open:
            if is_open:
                self._shelf.drop_namespace(NamespaceDigest(digest))
                within(CLEAR_S, self._sweep_all)

    def forbid(self, standing: Standing) -> None:
        """Sets what must not come here from now on (rule P6). What is there already is checked when it is read."""
        self._shelf.forbid(standing)

    def drop_ordered(self, orders: Sequence[ClearOrder]) -> None:
        """Removes all chunks that orders name, which takes a look at each file of their namespaces.

        Runs in the calling thread for as long as that takes. Never raises KVStoreError: a file that the disk refuses to
        show stays, and is checked when it is read.
        """
        for entry in self._shelf.entries():
            if not any(order.means(entry.namespace) for order in orders):
                continue
            with self._inside() as is_open:
                held = self._shelf.refer(entry.address) if is_open else None
                if held is None:
                    continue
                if self._is_ordered(held, orders):
                    self._remove(held)
                else:
                    self._shelf.unrefer(held, used=False)

    def stats(self) -> dict[str, int | float]:
        """Returns disk_entries; disk_held_bytes, as the file system counts them; disk_bytes_max; disk_refilling, which
        is 1 until all files of the folder are taken in.
        """
        return self._shelf.stats()

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the thread, and unlocks the folder once nobody uses it any more. Idempotent."""
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            self._refill.stop()
            if not self._users_count:
                self._folder.unlock()
            # A thread that hangs in the disk keeps the folder locked: it may still write there.
            elif not self._changed.wait_for(lambda: not self._users_count, timeout_s):
                log.warning("disk.in_use %s: it stays locked until the disk answers", self._folder.path)

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

    def _fetch(self, wanted: Wanted, index: int, image: memoryview) -> bool:
        entry = self._shelf.refer(wanted.addresses[index])
        if entry is None:
            return False
        # A file of another size is a block that was put with that size, or encrypted.
        whole, stays = False, entry.size_bytes != len(image) and not self._encodings.has_keys
        try:
            if not stays:
                found = self._read(entry, expected_of(wanted, index), image)
                whole, stays = found is True, found is not False
                self._reads.succeeded()
        except Overloaded as error:
            self._failed(self._reads, error)
            stays = True  # too few descriptors or too little memory: the file may be right
        except KVStoreError as error:
            self._failed(self._reads, error)
        if stays:
            self._shelf.unrefer(entry, used=whole)
        else:
            self._remove(entry)
        return whole

    def _is_ordered(self, entry: Entry, orders: Sequence[ClearOrder]) -> bool:
        try:
            seen = self._root.look(name_of(entry), FIXED_BYTES)
        except KVStoreError as error:
            self._failed(self._reads, error)
            return False
        found = incarnation_at(b"" if seen is None else seen.prefix)
        return any(order.forbids(entry.namespace, found, entry.used_s) for order in orders)

    def _read(self, entry: Entry, expected: Expected, image: memoryview) -> bool | None:
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
                if plain.read([image], 0, Borrowed()) != len(image):
                    return False
            except NotDecodable:
                return None
            except Damaged as damaged:
                return None if expected.kind is Kind.BLOCK and damaged.damage is Damage.GEOMETRY else False
        stamp_ns = recency.renewed_ns(mtime_ns, self._quantum(), QUANTUM_S, recency.decode(mtime_ns, QUANTUM_S).depth)
        if stamp_ns is not None:
            with suppress(KVStoreError):  # the bytes are right, even if its time is not renewed
                self._root.touch(name, stamp_ns)
        return True

    def _add(self, place: Place, image: memoryview, hints: Hints) -> bool:
        header = _header_of(place, image)
        if header is None or self._shelf.forbids(header):
            return False
        pieces = self._encodings.pieces_of_image(header, image)
        if pieces is None:
            return False
        name, size_bytes = name_of(place), byte_length(pieces)
        # A file without an entry has not been taken in yet, or is about to be removed.
        is_here = self._shelf.has(place.address) or self._root.stat(name) is not None
        if is_here or not self._shelf.make_room(place, size_bytes):
            return False
        self._sweep()
        claimed = self._shelf.claim(place, size_bytes, hints)
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
            self._remove(claimed.entry, staged, name)
            raise
        if not won or not self._shelf.ready(claimed):
            self._remove(claimed.entry)
            return False
        self._writes.succeeded()
        self._counters.add(NodeCount.DISK_WRITES)
        self._counters.add(NodeCount.DISK_WRITE_BYTES, size_bytes)
        return True

    def _remove(self, entry: Entry, *names: Name) -> None:
        """Takes away an entry that the caller refers to, and its file or the files ``names``."""
        self._shelf.leave(entry, *names)
        self._sweep()

    def _sweep(self) -> bool:
        """Removes some of the leaving files; True if there may be more. Never raises KVStoreError.

        Files that the disk refuses to remove keep their room. The next removal tries them again.
        """
        for _ in range(SWEEP_MAX):
            leaving = self._shelf.take_leaving()
            if leaving is None:
                return False
            try:
                for name in leaving.names:
                    self._root.remove(name)
            except KVStoreError as error:
                self._shelf.put_back(leaving)
                self._failed(self._writes, error)
                return False
            self._shelf.left(leaving)
        return True

    def _sweep_all(self) -> None:
        with self._inside() as is_open:
            while is_open and self._is_open and self._sweep():
                pass

    def _failed(self, pause: Pause, error: KVStoreError) -> None:
        self._counters.add(NodeCount.DISK_FAILED)
        log.debug("disk.failed %s", error)
        pause.failed()

    def _quantum(self) -> int:
        return recency.quantum_of(self._clock.now_s(), QUANTUM_S)


def _header_of(place: Place, image: memoryview) -> Header | None:
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
