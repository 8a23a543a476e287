"""The chunk files of one root, and what this node remembers of them. All bytes are verified.

Files are found, read, mapped, staged, published and quarantined. Native code does the common case, many chunks in one
call that needs no GIL (``StoredRun``). It reports failures, and ``ChunkStore`` redoes those one by one. Threads of the
executor call it: each has its own part of a run, or takes turns at a shared one. A file that is corrupt, or that
cannot be read, is renamed away from its name, so that the next put can repair it.

``PresenceCache`` remembers which chunks are present, so that a repeated match costs no file-system look-up: a memory,
not the truth. An entry is trusted for the quantum it was made in and the next, and a reader that finds a chunk gone
forgets it. A wrong entry costs a miss at the read, never a wrong byte. ``TouchQueue`` renews recency after reads.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.codec.encodings import NotDecodable
from kvstore.codec.image import ChunkRun, fill, plain, read_header, read_verified, verify, verify_whole
from kvstore.core import recency
from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.buffers import BufferLoan, BufferMap, Pieces, Sections, Withdrawn, byte_length, untouched_zeros
from kvstore.core.clock import Clock
from kvstore.core.executor import Tasks
from kvstore.core.metrics import Counters, NodeCount
from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import (
    LEAST,
    NS_PER_S,
    TICK_S,
    Hints,
    decode,
    is_fresh,
    renewed_ns,
    stamp_ns,
    stamps_ns,
)
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.format.header import (
    PAGE_BYTES,
    Damage,
    Damaged,
    Expected,
    Header,
    IdentityKind,
    Incarnation,
    decode_any,
)
from kvstore.format.keyset import KeySet, Mask
from kvstore.format.places import Name
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.root.interface import FileReader, LocalFiles, Stat, local_files
from kvstore.root.posix import PosixReader

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine


FORGOTTEN_MAX = 64
SPAN = 1 << 12
"""Rows searched for marks at a time: numpy's temporary arrays stay in the CPU cache."""


class PresenceCache:
    """Maps an address to the quantum in which it was last seen, and to whether its recency was renewed in it.

    A set-associative table of fixed size: the first 8 bytes of an address (a keyed hash, so evenly spread) choose a row
    of 8 entries and are what is compared. An entry takes 12 bytes. All are allocated at the start, so that traffic
    cannot exceed them; the system gives memory to those in use. A full row drops the entry seen longest ago.

    Rule H3: a look that began before a sweep condemned must not be remembered after it. So the caller reads ``epoch``
    before it looks, and ``add`` takes of an older epoch's finding only what was not forgotten since; forgetting begins
    a new epoch. Readers race with that: an entry that is being dropped can still be found, as if the look had come
    earlier.
    """

    __slots__ = (
        *("_clock", "_forgotten", "_lock", "_marks", "_prints", "_table"),
        *("epoch", "quantum_s"),
    )

    def __init__(self, entries_max: int, quantum_s: int, clock: Clock) -> None:
        rows = 1 << max(0, (entries_max // native.WAYS).bit_length() - 1)
        self._clock = clock
        self.quantum_s = quantum_s
        """Length of a quantum. A mark holds a quantum as its start divided by this, which fits 31 bits."""
        self._lock = threading.Lock()
        self.epoch = 0
        self._forgotten: deque[tuple[int, npt.NDArray[Any]]] = deque(maxlen=FORGOTTEN_MAX)
        """The chunks that ``forget_each`` forgot, and their epochs."""
        self._prints = untouched_zeros((rows, native.WAYS), np.uint64)
        self._marks = untouched_zeros((rows, native.WAYS), np.uint32)
        self._table = native.PresenceTable(self._prints.ctypes.data, self._marks.ctypes.data, rows - 1)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._marks))

    def tick(self) -> float:
        """Returns the start of the current tick: the time that the stamps of a put have."""
        return max(0.0, self._clock.now_s()) // TICK_S * TICK_S

    def quantum(self) -> int:
        """Returns the start of the current quantum."""
        return int(max(0.0, self._clock.now_s())) // self.quantum_s * self.quantum_s  # as ``quantum_of``

    def is_present(self, address: Address, quantum_start_s: int) -> bool:
        """True if it was seen in this quantum or the one before."""
        return bool(self.present((address,), quantum_start_s)[0])

    def add(self, address: Address, quantum_start_s: int, *, renewed: bool, epoch: int) -> None:
        """Notes that it was seen in this quantum by a look that began in ``epoch``; ``renewed`` if its stamp is too."""
        self.add_all((address,), quantum_start_s, renewed=renewed, epoch=epoch)

    def add_all(
        self, addresses: Sequence[Address], quantum_start_s: int, *, renewed: bool | npt.NDArray[np.bool_], epoch: int
    ) -> None:
        """Adds many addresses; ``renewed`` is one value, or one for each."""
        chunks = _chunks_of(b"".join(addresses))
        chunks["mtime_ns"] = np.where(renewed, quantum_start_s * NS_PER_S, -1)
        self.add_run(chunks.ctypes.data, len(chunks), native.DONE, quantum_start_s, epoch=epoch)

    def add_run(
        self, chunks: int, places: int | npt.NDArray[np.int32], status: int, quantum_start_s: int, *, epoch: int
    ) -> tuple[int, int]:
        """Adds those of native code's chunks that have a status; the first chunk is at address ``chunks``.

        ``places`` are their offsets, or how many there are. Chunks whose mtime is of this quantum count as renewed.
        Returns how many have the status, and the bytes of their sections, also if the epoch has changed and none is
        added.
        """
        section_bytes = ctypes.c_uint64()
        mark, renewed_ns = quantum_start_s // self.quantum_s << 1, quantum_start_s * NS_PER_S
        with self._lock:
            table = self._table if self._counts(epoch) else None
            found: int = native.brief.kv_known_add(
                table, chunks, *_listed(places), status, mark, renewed_ns, ctypes.addressof(section_bytes)
            )
            if epoch != self.epoch:
                for forgotten, each in self._forgotten:
                    if forgotten > epoch:
                        self._forget(each.ctypes.data, len(each), native.DONE)
        return found, section_bytes.value

    def forget_run(self, chunks: int, places: npt.NDArray[np.int32], status: int) -> None:
        with self._lock:
            self._forget(chunks, places, status)

    def forget(self, address: Address) -> None:
        chunks = _chunks_of(address)
        with self._lock:
            self._forget(chunks.ctypes.data, 1, native.DONE)

    def forget_each(self, packed: bytes) -> None:
        """Forgets chunks by their addresses, one after the other. Looks under way must not bring them back."""
        chunks = _chunks_of(packed)
        with self._lock:
            self.epoch += 1
            self._forgotten.append((self.epoch, chunks))
            self._forget(chunks.ctypes.data, len(chunks), native.DONE)

    def clear(self) -> None:
        with self._lock:
            self.epoch += 1
            self._forgotten.clear()
            for span in self._marked():
                self._marks[span] = 0

    def leading_count(self, packed: bytes, quantum_start_s: int) -> int:
        """Returns how many leading addresses, one after the other in ``packed``, are remembered as present."""
        if not packed:
            return 0
        # Not by ``present``: each call fewer counts for short prompts.
        present = self._have_mark(packed, max(quantum_start_s // self.quantum_s - 1 << 1, 1), 0)
        return len(present) if present.all() else int(present.argmin())

    def present(self, addresses: Sequence[Address], quantum_start_s: int) -> npt.NDArray[np.bool_]:
        """Returns which addresses are remembered as present."""
        return self._have_mark(b"".join(addresses), max(quantum_start_s // self.quantum_s - 1 << 1, 1), 0)

    def unrenewed(self, packed: bytes, quantum_start_s: int) -> list[int]:
        """Returns the positions in ``packed`` of the addresses whose recency is not known to be of this quantum."""
        if not packed:
            return []
        renewed = self._have_mark(packed, quantum_start_s // self.quantum_s << 1, 1)
        places: list[int] = np.flatnonzero(~renewed).tolist()
        return places

    def _counts(self, epoch: int) -> bool:
        """True if all that was forgotten after ``epoch`` is in ``_forgotten``."""
        return epoch == self.epoch or (bool(self._forgotten) and self._forgotten[0][0] <= epoch + 1)

    def _forget(self, chunks: int, places: int | npt.NDArray[np.int32], status: int) -> None:
        native.brief.kv_known_forget(self._table, chunks, *_listed(places), status)

    def _marked(self) -> Iterator[slice]:
        """Yields the spans of rows that have marks. What was never written to stays without memory."""
        for start in range(0, len(self._marks), SPAN):
            span = slice(start, start + SPAN)
            if self._marks[span].max():  # several times as fast as any()
                yield span

    def _have_mark(self, packed: bytes, least: int, bit: int) -> npt.NDArray[np.bool_]:
        """Returns which addresses have a mark of at least ``least`` that has ``bit`` set."""
        found = np.empty(len(packed) // ADDRESS_BYTES, np.bool_)
        at = found.__array_interface__["data"][0]
        native.brief.kv_known_have(self._table, packed, len(found), least, bit, at)
        return found


def _chunks_of(packed: bytes) -> npt.NDArray[Any]:
    """Returns the structures of chunks that are known by their addresses alone."""
    chunks = np.zeros(len(packed) // ADDRESS_BYTES, native.CHUNK)
    chunks["address"] = np.frombuffer(packed, "V16")
    return chunks


def _listed(places: int | npt.NDArray[np.int32]) -> tuple[int | None, int]:
    """Returns where the offsets are, None for all from 0 on, and how many there are, for native code."""
    if isinstance(places, int):
        return None, places
    assert places.dtype == np.int32 and places.flags.c_contiguous
    return places.__array_interface__["data"][0], len(places)


log = logging.getLogger(__name__)


FAILED = (Unavailable, PermissionDenied)
"""The errors of a root for a file that is there and cannot be read."""
FAILURES_MAX = 3
"""Failed reads of one file after which it is renamed away."""
SUSPECTS_MAX = 1024
"""Limit on remembered files; beyond it, the oldest are trusted again until their next failure."""
READ_BYTES = 1 << 20


class SuspectFiles:
    """The chunks of one node whose files could not be read: how often. Thread-safe.

    One read proves corruption; an I/O error or a missing permission may pass. But a file that stays unreadable is a
    permanent miss, while its size makes every put skip the chunk. So from its first failed read on its size is not
    trusted, and each look reads it (``ChunkStore.settle``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: OrderedDict[Address, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, address: object) -> bool:
        return address in self._failures

    def failed(self, address: Address) -> int:
        """Notes a failed read; returns how many there were."""
        with self._lock:
            count = self._failures[address] = self._failures.get(address, 0) + 1
            self._failures.move_to_end(address)
            while len(self._failures) > SUSPECTS_MAX:
                self._failures.popitem(last=False)
            return count

    def forget(self, address: Address) -> None:
        if address in self._failures:
            with self._lock:
                self._failures.pop(address, None)


_DAMAGE = {damage: NodeCount[f"DAMAGE_{damage.name}"] for damage in Damage}

Places = npt.NDArray[np.int32]
"""Offsets of chunks in a run, counted from 0."""
TURN_NS = 250_000_000
"""Time after which a turn at a put ends, however little it did: a thread that is in one call for ``stall_s`` counts as
hung.
"""


class StoredRun(ChunkRun):
    """A run of a store's files, whose findings the store remembers and counts. Failures are left to ``ChunkStore``.

    Several threads do it together: each takes the next few chunks again and again, in one call. So all end at about
    the same time, with few calls. That matters because Python's own memory has left the processor's cache by the time
    the next call needs it (docs/performance-notes.md).
    """

    def __init__(
        self, chunks: ChunkStore, files: LocalFiles, keys: KeySet, first: int, count: int, sections: BufferMap | None
    ) -> None:
        super().__init__(files, chunks.shard_bits, keys, first, count, sections)
        self._files = files
        self._chunks = chunks
        self._known = chunks.known
        self._counters = chunks.counters

    # Parts

    def look(self, start: int, stop: int, epoch: int | None = None) -> tuple[Mask, npt.NDArray[np.int64]]:
        epoch = self._known.epoch if epoch is None else epoch
        found, mtimes_ns = super().look(start, stop)
        if self._doubt(np.arange(start - self.first, stop - self.first, dtype=np.int32)):
            part = self.items[start - self.first : stop - self.first]
            found = part["status"] == native.FOUND
            mtimes_ns = part["mtime_ns"][found]
        self._known.add_run(*self.part(start, stop), native.FOUND, self._known.quantum(), epoch=epoch)
        return found, mtimes_ns

    def present(self, start: int, stop: int, epoch: int) -> tuple[Mask, list[int]]:
        """Returns which blocks exist, whatever their size, and the indexes of those not known yet.

        ``epoch`` is the epoch of the presence cache, read before the caller checked that no block is condemned.
        """
        found, _ = self.look(start, stop, epoch)
        statuses = self.items["status"][start - self.first : stop - self.first]
        is_known = statuses == native.FOUND
        if self._files.knows_absence:
            is_known |= statuses == native.ABSENT
        left: list[int] = (start + np.flatnonzero(~is_known)).tolist()
        return found, left

    def read(self, start: int, stop: int, borrowed: BufferLoan) -> Mask:
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            done = super().read(start, stop, borrowed)
            timed.size_bytes = self._note(start, stop, epoch)
        return done

    def map(self, start: int, stop: int) -> list[memoryview | None]:
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            mapped = super().map(start, stop)
            timed.size_bytes = self._note(start, stop, epoch)
        return mapped

    def _note(self, start: int, stop: int, epoch: int) -> int:
        """Remembers the DONE chunks as present; returns the bytes of their sections."""
        at, count = self.part(start, stop)
        chunks, size_bytes = self._known.add_run(at, count, native.DONE, self._known.quantum(), epoch=epoch)
        if chunks:
            self._counters.add_read(size_bytes, chunks)
        return size_bytes

    # Turns

    def begin_turns(self, step: int, most: int, files: int = 1) -> None:
        """Prepares turns of at least ``step`` and about ``most`` chunks. A step is taken at a time.

        A thread that reads may have ``files`` files open at the same time; a step may need more.
        """
        self._step, self._most, self._open_max = step, most, max(step, files)
        self._next = ctypes.c_int64(0)
        self._header_bytes_max = int(self.items["header_bytes"].max())
        self._abandoned: ctypes.c_int32 | None = None
        self.items["status"] = native.OTHER
        self.epoch = self._known.epoch
        """The epoch of what the node remembers, from before the first look at the root."""

    def stop(self) -> None:
        """Begins no more chunks."""
        self._next.value = self.count

    def _turn(self) -> tuple[Any, Places]:
        """Returns what native code needs for a turn, and the memory for the offsets of the chunks that it reports."""
        reported = np.empty(self._most + self._step, np.int32)
        at = reported.__array_interface__["data"][0]
        taken = ctypes.pointer(self._next)
        turn = native.Turn(taken, self._step, self._most, self._open_max, self._header_bytes_max, at, time_ns=TURN_NS)
        if self._abandoned is not None:
            turn.abandoned = ctypes.pointer(self._abandoned)
        return turn, reported

    def read_turn(self, borrowed: BufferLoan) -> tuple[list[int], bool]:
        """Reads chunks that no other thread took. Raises Withdrawn.

        Returns the offsets of the chunks that are left to ``ChunkStore.read``, and whether there may be more to read.
        """
        turn, reported = self._turn()
        with self._counters.timed("root", "read") as timed:
            outcome = native.library.kv_read_turn(self.common, self.at(0), self.count, turn, borrowed.natively)
            timed.size_bytes, left = turn.bytes, reported[: turn.reported_count]
            if left.size:
                self.read_blocked(left, borrowed)
                is_read = self.items["status"][left] == native.DONE
                timed.size_bytes += sum(map(self.payload_bytes, left[is_read].tolist()))
                left = left[~is_read]
        if outcome < 0:
            raise Withdrawn
        return left.tolist(), bool(outcome)

    def end_read(self) -> Mask:
        """Returns which chunks were read and verified. Call it once, when no thread writes into the memory any more."""
        self._note(self.first, self.first + self.count, self.epoch)
        done: Mask = self.items["status"] == native.DONE
        return done

    # Puts

    def begin_put(
        self,
        step: int,
        most: int,
        depths: npt.NDArray[np.int64],
        *,
        stamped_s: float,
        durable: bool,
        hints: Hints,
        abandoned: ctypes.c_int32 | None = None,
    ) -> None:
        """Prepares turns that stage chunks; ``depths`` are their indexes in their prompt, ``stamped_s`` their time.

        After its turn a chunk's status says that it is already there (FOUND), staged (DONE), PUBLISHED, or left to
        Python. With ``abandoned`` a turn publishes what it staged, unless that is set by then.
        """
        chunks = self._chunks
        self.begin_turns(step, most)
        self._abandoned = abandoned
        self._session = chunks.session()
        self._put_common = native.Common.from_buffer_copy(self.common)
        self._put_common.session = self._session.hex().encode()
        self._put_common.durable = durable
        self.is_right = bool(self.common.from_images)
        """True if native code compares what it stages with the images that it comes from."""
        incarnations = [chunks.ids.fresh() for _ in range(self.count)]
        self.items["number"] = list(islice(chunks.numbers, self.count))
        self.items["incarnation"] = np.frombuffer(b"".join(incarnations), "V16")
        self.items["mtime_ns"] = stamps_ns(stamped_s, depths, hints)

    def stage_turn(self) -> tuple[Places, bool]:
        """Looks for chunks that no other thread took, and stages those that are missing.

        Returns the offsets of the chunks that it took, and whether there may be more. Those that are then neither found
        nor staged left nothing behind, and are left to ``ChunkStore``; ``publish`` counts those that are PUBLISHED.
        """
        with self._counters.timed("root", "write") as timed:
            turn, reported = self._turn()
            more = bool(native.library.kv_stage_turn(self._put_common, self.at(0), self.count, turn))
            places, timed.size_bytes = reported[: turn.reported_count], turn.bytes
        if not len(places):
            return places, more
        self._doubt(places)
        at = self.at(0)
        self._known.add_run(at, places, native.FOUND, self._known.quantum(), epoch=self.epoch)
        for status in (native.DONE, native.PUBLISHED):
            self._known.forget_run(at, places, status)
        return places, more

    def publish(self, places: Places, *, ordered: bool) -> tuple[int, int]:
        """Gives staged chunks their final names; returns how many, and the bytes of their sections.

        An ``ordered`` call stops at the first chunk that native code cannot publish. Those that are not PUBLISHED are
        left to ``ChunkStore.publish``.
        """
        epoch = self._known.epoch
        if not self._put_common.durable:  # those are all left to Python, because each waits for the device
            listed = places.__array_interface__["data"][0]
            native.library.kv_publish(self._put_common, self.at(0), listed, len(places), ordered)
        return self.count_published(places, epoch)

    def count_published(self, places: Places, epoch: int) -> tuple[int, int]:
        """Remembers and counts those that are PUBLISHED; returns how many, and the bytes of their sections."""
        at, quantum = self.at(0), self._known.quantum()
        chunks, size_bytes = self._known.add_run(at, places, native.PUBLISHED, quantum, epoch=epoch)
        if chunks:
            published = places[self.items["status"][places] == native.PUBLISHED]
            self._chunks.usage.wrote(size_bytes + int(self.items["header_bytes"][published].sum()))
            self._counters.add(NodeCount.CHUNKS_WRITTEN, chunks)
            self._counters.add(NodeCount.BYTES_WRITTEN, size_bytes)
        return chunks, size_bytes

    def staged_name(self, place: int) -> Name:
        """Returns the name under which a chunk is staged."""
        return places.staged(self._session, int(self.items["number"][place]))

    def _doubt(self, places: Places) -> bool:
        """Leaves to ``ChunkStore`` what was found by size alone and was unreadable before; True if there was any."""
        all_suspects = self._chunks.suspects
        if not len(all_suspects):
            return False
        suspects = [
            place
            for place in places.tolist()
            if self.items["status"][place] == native.FOUND and self.items["address"][place].tobytes() in all_suspects
        ]
        self.items["status"][suspects] = native.OTHER
        return bool(suspects)


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk that is complete under its staging name and waits to be published."""

    name: Name
    expected: Expected
    size_bytes: int
    """Size of its file; an encoded file has another size than ``expected`` says."""


class ChunkStore:
    """The chunk files of one root, as one node sees them."""

    def __init__(self, node: Engine, session: Callable[[], bytes], numbers: Iterator[int]) -> None:
        """``session`` returns the one to stage under; another one once the node has joined anew.

        ``numbers`` are for the names of staged files; none comes twice.
        """
        self.root = node.root
        self.known = node.known
        self.usage = node.gc_view.usage
        self.shard_bits = node.identity.shard_bits
        self.counters = node.counters
        self.session = session
        self.numbers = numbers
        self.ids = node.ids
        self.encodings = node.encodings
        self.suspects = SuspectFiles()
        self._files = local_files(node.root) if is_available() else None

    # Many chunks, in native code

    @property
    def is_native(self) -> bool:
        """True if native code reads this root's files."""
        return self._files is not None

    @property
    def stages_natively(self) -> bool:
        return self._files is not None and self._files.stages

    def run(
        self, keys: KeySet, first: int, count: int, sections: Sections | None = None, *, fills: bool = False
    ) -> StoredRun | None:
        """Returns chunks ``first`` to ``first + count - 1`` as a native run; None if they must be done one by one.

        The run is written from ``sections``, or read into them if it ``fills``. Without sections it is looked at or
        mapped.
        """
        encodings = self.encodings
        if self._files is None or count < 1:
            return None
        if not encodings.is_plain and encodings.encodes(keys.namespace.tenant):
            return None
        if sections is None:
            return StoredRun(self, self._files, keys, first, count, None)
        if (
            not isinstance(sections, BufferMap)
            or not sections.covers(first, count)
            or (fills and not sections.is_writable)
        ):
            return None
        return StoredRun(self, self._files, keys, first, count, sections)

    def layer_files(self, tenant: str) -> tuple[LocalFiles | None, int] | None:
        """Returns the files that a layer-by-layer read may open, and their shard bits; None without native code."""
        if not is_available() or self.encodings.encodes(tenant):
            return None
        return None if self._files is None or self._files.direct else self._files, self.shard_bits

    # One chunk

    def name(self, address: Address, namespace: NamespaceId) -> Name:
        return places.chunk(address, namespace, self.shard_bits)

    def is_present(self, expected: Expected) -> bool:
        """True if a file of the right size exists. A file of another size is damaged, and set aside.

        Raises the root's error if the file exists and cannot be read.
        """
        return self.look(expected) is not None

    def look(self, expected: Expected) -> Stat | None:
        """Returns the stat of a file of the right size; None if there is none. Otherwise as ``is_present``."""
        if expected.address in self.suspects:
            self.settle(expected.address, self._name_of(expected))
        epoch = self.known.epoch
        stat = self.root.stat(self._name_of(expected))
        if stat is None:
            self.known.forget(expected.address)
            return None
        with self.noted(expected):
            if stat.size_bytes != expected.file_bytes and not self._is_encoded(expected):
                return None
        self._seen(expected, stat, epoch)
        return stat

    def lacks(self, stat: Stat, hints: Hints) -> bool:
        """True if a put with ``hints`` has to raise the hints of a chunk that it found, or to take it back."""
        return not recency.decode(stat.mtime_ns, self.known.quantum_s).covers(hints)

    def read(self, expected: Expected, sections: Pieces, borrowed: BufferLoan) -> bool:
        """Reads and verifies a whole chunk into ``sections``; False is a miss, which leaves their content undefined.

        Raises Withdrawn.
        """
        epoch = self.known.epoch
        with self.noted(expected):
            reader = self._open(expected)
        if reader is None:
            return False
        with self.noted(expected), reader, self.counters.timed("root", "read") as timed:
            timed.size_bytes = expected.payload_bytes
            try:
                read_verified(reader, expected, sections, borrowed)
            except Damaged as damaged:
                borrowed.check()  # the caller may have changed what was verified
                self.set_aside(expected, damaged.damage)
                return False
            self._seen(expected, reader.stat, epoch)
        self.suspects.forget(expected.address)
        self.counters.add_read(expected.payload_bytes)
        return True

    def open(self, expected: Expected) -> tuple[FileReader, Header] | None:
        """Opens a chunk and verifies its header, for reading ranges; None is a miss."""
        epoch = self.known.epoch
        with self.noted(expected):
            reader = self._open(expected)
        if reader is None:
            return None
        try:
            try:
                with self.noted(expected):
                    header = read_header(reader, expected)
            except Damaged as damaged:
                self.set_aside(expected, damaged.damage)
                reader.close()
                return None
            self._seen(expected, reader.stat, epoch)
        except BaseException:
            reader.close()
            raise
        return reader, header

    def open_file(self, expected: Expected) -> PosixReader | None:
        """Opens a chunk as ``open`` does, for a client that reads the file itself.

        None also if the client must not read the file: it is encoded, its tenant's chunks are encrypted, or it is not a
        file.
        """
        if self.encodings.encrypts(expected.tenant):
            return None
        opened = self.open(expected)
        if opened is None:
            return None
        if isinstance(opened[0], PosixReader):
            return opened[0]
        opened[0].close()
        return None

    def read_range(
        self, reader: FileReader, header: Header, expected: Expected, first: int, sections: Pieces, borrowed: BufferLoan
    ) -> bool:
        """Reads and verifies sections from ``first`` on of an open chunk; False is a miss."""
        offset = header.header_bytes + first * header.section_bytes
        try:
            with self.noted(expected), self.counters.timed("root", "read") as timed:
                timed.size_bytes = len(sections) * header.section_bytes
                fill(reader, sections, offset, borrowed)
                verify(sections, header.checksums[first : first + len(sections)])
        except Damaged as damaged:
            borrowed.check()
            self.set_aside(expected, damaged.damage)
            return False
        # A chunk counts once, with its first section.
        self.counters.add_read(len(sections) * header.section_bytes, chunks=0 if first else 1)
        return True

    def stage(
        self,
        expected: Expected,
        sections: Pieces,
        stamped_s: float,
        durable: bool,
        hints: Hints,
        depth: int,
    ) -> Staged:
        """Writes a chunk, the one at ``depth`` of its prompt, under a fresh staging name, stamped ``stamped_s``."""
        pieces = self.encodings.pieces(expected, Incarnation(self.ids.fresh()), sections)
        name = places.staged(self.session(), next(self.numbers))
        stamp = stamp_ns(stamped_s, depth, hints)
        try:
            with self.counters.timed("root", "write") as timed:
                timed.size_bytes = expected.payload_bytes
                self.root.stage(name, pieces, stamp_ns=stamp, durable=durable)
        except KVStoreError:
            self.discard(name)  # torn files must not keep a full disk full
            raise
        return Staged(name, expected, byte_length(pieces))

    def publish(self, staged: Staged, durable: bool) -> bool:
        """Gives a staged chunk its final name; False if another writer was first, whose chunk stays."""
        expected, epoch = staged.expected, self.known.epoch
        won = self.root.publish(staged.name, self._name_of(expected), durable=durable)
        if won:
            self.usage.wrote(staged.size_bytes)
            self.known.add(expected.address, self.known.quantum(), renewed=True, epoch=epoch)
            self.counters.add(NodeCount.CHUNKS_WRITTEN)
            self.counters.add(NodeCount.BYTES_WRITTEN, expected.payload_bytes)
        else:
            self.counters.add(NodeCount.CHUNKS_LOST_RACE)
            with suppress(KVStoreError):  # on failure it is not remembered, and the next request looks for it
                # The winner's file may be encrypted with a key that this node lacks: then no match may promise it.
                self.look(expected)
        return won

    def set_aside(self, expected: Expected, damage: Damage) -> None:
        """Moves a corrupt file away from its name, so that the next put can repair it. Never raises.

        Another node may have put a good file there between our look and our rename. So the moved file is verified once
        more under its new name, which only this node uses. An intact file is linked back, unless another writer has
        taken the name.
        """
        self.counters.add(NodeCount.MISS_DAMAGED)
        self.counters.add(_DAMAGE[damage])
        self.known.forget(expected.address)
        name, aside = self._name_of(expected), self._name_aside(expected.address)
        try:
            if not self.root.move(name, aside):
                return
            if self._is_intact(aside, expected):
                self.root.publish(aside, name, durable=False)
                self.counters.add(NodeCount.QUARANTINE_RESTORED)
            else:
                self.counters.add(NodeCount.QUARANTINED)
        except KVStoreError:
            # The root is read-only or failing: the read is still a miss, and the next read finds the file again.
            self.counters.add(NodeCount.QUARANTINE_FAILED)

    def settle(self, address: Address, name: Name) -> None:
        """Reads the file of a suspect again, and renames it away if that fails too often.

        Returns when the file can be read after all, or is gone, or was renamed. Raises the root's error, naming the
        file, if it can be neither read nor renamed: no put can repair it then.
        """
        self.known.forget(address)
        while True:
            try:
                self._read_through(name)
            except FAILED as error:
                if self.suspects.failed(address) < FAILURES_MAX:
                    continue
                if isinstance(error, PermissionDenied):  # processes of another user may read it, and hold it
                    raise PermissionDenied(
                        f"{name} cannot be read ({error}): fix its permissions, or delete it"
                    ) from error
                try:
                    self._set_suspect_aside(address, name)
                except FAILED as refused:
                    raise type(refused)(
                        f"{name} cannot be read ({error}) and cannot be set aside ({refused}): fix its permissions, "
                        "or delete it"
                    ) from error
            self.suspects.forget(address)
            return

    def _set_suspect_aside(self, address: Address, name: Name) -> None:
        """Moves an unreadable file away. One that is readable under its new name goes back; the next reader verifies
        it. Raises the root's error if the file cannot be moved.
        """
        aside = self._name_aside(address)
        if not self.root.move(name, aside):
            return
        try:
            is_readable = self._read_through(aside)
        except KVStoreError:
            self.counters.add(NodeCount.QUARANTINED)
            return
        if is_readable:
            with suppress(KVStoreError):  # on failure a collector puts it back
                self.root.publish(aside, name, durable=False)
                self.counters.add(NodeCount.QUARANTINE_RESTORED)

    def _read_through(self, name: Name) -> bool:
        """Reads a whole file, without looking at its bytes; False if there is none. Raises the root's errors."""
        reader = self.root.open(name)
        if reader is None:
            return False
        with reader:
            piece, offset = memoryview(bytearray(min(READ_BYTES, max(1, reader.stat.size_bytes)))), 0
            while count := reader.read([piece], offset, BufferLoan()):
                offset += count
        return True

    def _is_intact(self, name: Name, expected: Expected) -> bool:
        found = self.root.open(name)
        if found is None:
            return False
        with found:
            try:
                reader = plain(found, expected, self.encodings)
                if reader is None:
                    return False
                verify_whole(reader, expected)
            except NotDecodable:
                return True  # nothing proves damage: a node with its key may find it right
            except Damaged:
                return False
        return True

    def _name_aside(self, address: Address) -> Name:
        return places.quarantined(address, self.session(), next(self.numbers))

    @contextmanager
    def noted(self, expected: Expected) -> Iterator[None]:
        """Wraps a read of a chunk's file: records a file that the root cannot read, so that its size is not trusted."""
        try:
            yield
        except FAILED:
            self.suspects.failed(expected.address)
            self.known.forget(expected.address)
            raise

    def _open(self, expected: Expected) -> FileReader | None:
        """Opens a chunk file of the right size; None is a miss."""
        reader = self.root.open(self._name_of(expected))
        if reader is None:
            self.known.forget(expected.address)
            self.counters.add(NodeCount.MISS_ABSENT)
            return None
        try:
            found = plain(reader, expected, self.encodings)
        except NotDecodable as reason:
            reader.close()
            self._not_decodable(expected, reason)
            return None
        except Damaged as damaged:
            reader.close()
            self._wrong_size(expected, damaged.damage)
            return None
        except BaseException:
            reader.close()
            raise
        if found is None:
            reader.close()
            self._wrong_size(expected)
        return found

    def _is_encoded(self, expected: Expected) -> bool:
        """True if a file without the size of version 1 is encoded and readable here; sets any other file aside."""
        reader = self.root.open(self._name_of(expected))
        if reader is None:
            self.known.forget(expected.address)
            return False
        with reader:
            try:
                if self.encodings.is_whole(reader, expected):
                    return True
                damage = Damage.SIZE
            except NotDecodable as reason:
                self._not_decodable(expected, reason)
                return False
            except Damaged as damaged:
                damage = damaged.damage
        self._wrong_size(expected, damage)
        return False

    def _not_decodable(self, expected: Expected, reason: NotDecodable) -> None:
        """Counts a miss of this node alone: another node has the key."""
        self.known.forget(expected.address)
        self.counters.add(reason.counter)

    def _wrong_size(self, expected: Expected, damage: Damage = Damage.SIZE) -> None:
        """Sets aside a file of the wrong size, unless the engine asked for a block with another size than it has."""
        if expected.kind is IdentityKind.BLOCK and self._is_block_of_other_size(expected):
            self.counters.add(NodeCount.MISS_OTHER_SIZE)
            return
        self.set_aside(expected, damage)

    def _is_block_of_other_size(self, expected: Expected) -> bool:
        reader = self.root.open(self._name_of(expected))
        if reader is None:
            return False
        with reader:
            raw = bytearray(min(expected.header_bytes + PAGE_BYTES, reader.stat.size_bytes))
            if reader.read([memoryview(raw)], 0, BufferLoan()) != len(raw):
                return False
            try:
                header = decode_any(raw)
            except Damaged:
                return False
            same = (header.address, header.namespace) == (expected.address, expected.namespace)
            return same and header.kind is IdentityKind.BLOCK and header.file_bytes == reader.stat.size_bytes

    def _seen(self, expected: Expected, stat: Stat, epoch: int) -> None:
        quantum = self.known.quantum()
        self.known.add(expected.address, quantum, renewed=is_fresh(stat.mtime_ns, quantum), epoch=epoch)

    def discard(self, name: Name) -> None:
        try:
            self.root.discard(name)
        except KVStoreError:
            self.counters.add(NodeCount.QUARANTINE_FAILED)

    def _name_of(self, expected: Expected) -> Name:
        return places.chunk(expected.address, NamespaceId(expected.namespace[:8]), self.shard_bits)


@dataclass(frozen=True, slots=True)
class _Renewal:
    namespace: NamespaceId
    packed_addresses: bytes
    """The addresses, one after the other."""
    depths: Sequence[int] | None
    """The index of each block in its prompt, as far as the request says; None for a chain from its first chunk on."""
    hints: Hints
    lacking: frozenset[int]
    start_s: float = 0.0
    """The least time of their stamps, if it is later than the start of the quantum."""

    @property
    def count(self) -> int:
        return len(self.packed_addresses) // ADDRESS_BYTES

    def address(self, index: int) -> Address:
        return Address(self.packed_addresses[index * ADDRESS_BYTES : (index + 1) * ADDRESS_BYTES])


class TouchQueue:
    """A bounded queue of used chunks, whose recency is renewed: parents before children, once per quantum.

    It has its own thread because renewal only advises garbage collection: it must cost a reader nothing, and a root
    that hangs must stop nothing else. A renewal costs three system calls: a look, and a touch with a look right before
    it. If another node has renewed in this quantum, it costs the first look, and none if this node knows that.
    """

    def __init__(self, chunks: ChunkStore, counters: Counters, queue_max: int) -> None:
        self._chunks = chunks
        self._counters = counters
        self._tasks = Tasks("kvstore-refresh", 1, queue_max)
        self._enabled = chunks.root.traits.touch

    def used(self, wanted: KeySet, hints: Hints = LEAST, lacking: frozenset[int] = frozenset()) -> None:
        """Notes that all of these were read or found. Never blocks.

        A put raises the hints of found chunks to its ``hints``: ``lacking`` are the positions of those whose hints were
        lower.
        """
        if not self._enabled or not len(wanted):
            return
        # Neither tokens nor keys are kept.
        depths = None if wanted.prefix_ordered else wanted.depths()
        renewal = _Renewal(wanted.namespace.id, wanted.packed_addresses, depths, hints, lacking)
        has_places = self._places(renewal, self._chunks.known.quantum())
        if has_places and not self._tasks.submit(partial(self._renew, renewal)):
            self._counters.add(NodeCount.REFRESH_DROPPED, len(wanted))

    def renew(self, chain: KeySet, hints: Hints, lacking: frozenset[int], start_s: float) -> None:
        """Renews the leading chunks of a chain on the calling thread, before a child of theirs gets a fresh stamp."""
        if self._enabled and len(chain):
            self._renew(_Renewal(chain.namespace.id, chain.packed_addresses, None, hints, lacking, start_s))

    def drain(self) -> None:
        self._tasks.drain()

    def close(self, timeout_s: float = 1.0) -> None:
        """Finishes what is queued, as far as ``timeout_s`` allows."""
        self._tasks.close(timeout_s)

    def _places(self, renewal: _Renewal, quantum: int) -> list[int]:
        """Returns the positions of the chunks that need a look."""
        places = self._chunks.known.unrenewed(renewal.packed_addresses, quantum)
        if not renewal.lacking:
            return places
        return sorted({*places, *(place for place in renewal.lacking if place < renewal.count)})

    def _renew(self, renewal: _Renewal) -> None:
        """Renews what it can; counts what the root refuses."""
        try:
            self._renew_each(renewal)
        except KVStoreError:
            self._counters.add(NodeCount.REFRESH_DROPPED)

    def _renew_each(self, renewal: _Renewal) -> None:
        chunks = self._chunks
        quantum, epoch = chunks.known.quantum(), chunks.known.epoch
        for index, name, stamp in self._planned(renewal, quantum):
            if stamp is not None:
                stat = chunks.root.stat(name)
                if stat is not None and stat.mtime_ns >= stamp:
                    continue  # renewed by a put of another process since the look: its time must not go back
                if not chunks.root.touch(name, stamp):
                    self._counters.add(NodeCount.REFRESH_DROPPED)
                    if renewal.depths is None:
                        return  # the chunk is gone: stop, as in _look
                    continue
                self._counters.add(NodeCount.REFRESHED)
            address = renewal.address(index)
            # A file of this name is there. A node that looked into it has remembered whether this node can read it.
            if chunks.known.is_present(address, quantum):
                chunks.known.add(address, quantum, renewed=True, epoch=epoch)

    def _planned(self, renewal: _Renewal, quantum: int) -> list[tuple[int, Name, int | None]]:
        """Returns the position, name and new stamp of each chunk, parents first; None if its stamp stays.

        No chunk gets lower hints or fewer uses than the chunk behind it. So the next renewal mends what another host's
        renewal at the same moment took away, or what a put set too low when it repaired a chunk.
        """
        plans: list[tuple[int, Name, int | None]] = []
        quantum_s = self._chunks.known.quantum_s
        least, uses_least, start_s = renewal.hints, 0, max(quantum, renewal.start_s)
        looked = self._look(renewal, quantum)
        while looked:
            index, name, mtime_ns = looked.pop()
            depth = index
            if renewal.depths is not None:  # its writer knew at least as well as this request
                depth = max(renewal.depths[index], decode(mtime_ns, quantum_s).depth)
            stamp = renewed_ns(mtime_ns, start_s, quantum_s, depth, least, uses_least)
            plans.append((index, name, stamp))
            if renewal.depths is None:
                after = decode(mtime_ns if stamp is None else stamp, quantum_s)
                least, uses_least = least.raised_to(after.hints), max(uses_least, after.uses)
                is_next = bool(looked) and looked[-1][0] == index - 1
                if index and stamp is not None and not is_next:
                    # A slow put stamps its chunks with the time of its start, so a parent that another put wrote later
                    # may belong to this quantum already. Its child would then count a use that the parent does not.
                    looked += self._look_at(renewal, index - 1)
        plans.reverse()
        return plans

    def _look(self, renewal: _Renewal, quantum: int) -> list[tuple[int, Name, int]]:
        """Returns position, name and mtime of each chunk that may have to be renewed."""
        looked: list[tuple[int, Name, int]] = []
        for index in self._places(renewal, quantum):
            found = self._look_at(renewal, index)
            looked += found
            if found:
                continue
            # The chunk is gone. Its children keep their older stamps, because a chunk is never staler than its child.
            self._counters.add(NodeCount.REFRESH_DROPPED)
            if renewal.depths is None:
                break
        return looked

    def _look_at(self, renewal: _Renewal, index: int) -> list[tuple[int, Name, int]]:
        """Returns position, name and mtime of one chunk; nothing if it is gone."""
        name = self._chunks.name(renewal.address(index), renewal.namespace)
        stat = self._chunks.root.stat(name)
        return [] if stat is None else [(index, name, stat.mtime_ns)]
