"""One chunk file at a time: look, read, write, set aside. Every byte that leaves here is verified.

Called on lanes only. ``Sections`` are views of the caller's memory, one per section, in file order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvstore import recency
from kvstore.address import Address
from kvstore.buffers import Borrowed, Pieces, byte_length
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import PAGE_BYTES, Damage, Damaged, Expected, Header, Incarnation, Kind, decode_any
from kvstore.format.places import Name
from kvstore.hints import Hints
from kvstore.namespace import NamespaceId
from kvstore.node.chunk_runs import ChunkRuns, ChunkWriter
from kvstore.node.counters import Counters
from kvstore.node.encoded import DecodedReader, Encodings, NotDecodable
from kvstore.node.gc_state import Usage
from kvstore.node.images import fill, plain, read_header, read_verified, read_whole, verify, verify_whole
from kvstore.node.incarnations import Incarnations
from kvstore.node.known import Known
from kvstore.node.quarantine import Quarantine
from kvstore.node.unreadable import FAILED
from kvstore.recency import is_fresh, stamp_ns
from kvstore.root.interface import Reader, Root, Stat
from kvstore.root.posix import PosixReader


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk that is complete under its staging name and waits to be published."""

    name: Name
    expected: Expected
    size_bytes: int
    """Size of its file; an encoded file has another size than ``expected`` says."""


class Chunks:
    """The chunk files of one root, as one node sees them."""

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        session: Callable[[], bytes],
        known: Known,
        counters: Counters,
        incarnations: Incarnations,
        numbers: Iterator[int],
        encodings: Encodings,
        usage: Usage,
    ) -> None:
        self.root = root
        self.known = known
        self.usage = usage
        self._shard_bits = shard_bits
        self._counters = counters
        self._writer = writer = ChunkWriter(session, numbers, incarnations, encodings, usage)
        self.quarantine = Quarantine(root, writer, known, counters)
        self.runs = ChunkRuns(root, shard_bits, writer, known, counters, self.quarantine.unreadable)

    def name(self, address: Address, namespace: NamespaceId) -> Name:
        """Returns the chunk's final name."""
        return places.chunk(address, namespace, self._shard_bits)

    def is_present(self, expected: Expected) -> bool:
        """True if a file of the right size exists. A file of another size is damaged, and set aside.

        Raises the root's error if the file exists and cannot be read.
        """
        return self.look(expected) is not None

    def look(self, expected: Expected) -> Stat | None:
        """Returns the stat of a file of the right size; None if there is none. Otherwise as ``is_present``."""
        if expected.address in self.quarantine.unreadable:
            self.quarantine.settle(expected.address, self._name_of(expected))
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

    def read(self, expected: Expected, sections: Pieces, borrowed: Borrowed) -> bool:
        """Reads and verifies a whole chunk into ``sections``; False is a miss, which leaves their content undefined.

        Raises Withdrawn.
        """
        epoch = self.known.epoch
        with self.noted(expected):
            reader = self._open(expected)
        if reader is None:
            return False
        with self.noted(expected), reader, self._counters.timed("root", "read") as timed:
            timed.size_bytes = expected.payload_bytes
            try:
                read_verified(reader, expected, sections, borrowed)
            except Damaged as damaged:
                borrowed.check()  # the caller may have changed what was verified
                self.set_aside(expected, damaged.damage)
                return False
            self._seen(expected, reader.stat, epoch)
        self.quarantine.unreadable.forget(expected.address)
        self._counters.add_read(expected.payload_bytes)
        return True

    def open(self, expected: Expected) -> tuple[Reader, Header] | None:
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
        if self._writer.encodings.encrypts(expected.tenant):
            return None
        opened = self.open(expected)
        if opened is None:
            return None
        if isinstance(opened[0], PosixReader):
            return opened[0]
        opened[0].close()
        return None

    def read_range(
        self, reader: Reader, header: Header, expected: Expected, first: int, sections: Pieces, borrowed: Borrowed
    ) -> bool:
        """Reads and verifies sections from ``first`` on of an open chunk; False is a miss."""
        offset = header.header_bytes + first * header.section_bytes
        try:
            with self.noted(expected), self._counters.timed("root", "read") as timed:
                timed.size_bytes = len(sections) * header.section_bytes
                fill(reader, sections, offset, borrowed)
                verify(sections, header.checksums[first : first + len(sections)])
        except Damaged as damaged:
            borrowed.check()
            self.set_aside(expected, damaged.damage)
            return False
        # A chunk counts once, with its first section.
        self._counters.add_read(len(sections) * header.section_bytes, chunks=0 if first else 1)
        return True

    def map(self, expected: Expected) -> memoryview | None:
        """Returns the verified payload, mapped read-only from the root if possible; None is a miss."""
        epoch = self.known.epoch
        with self.noted(expected):
            reader = self._open(expected)
        if reader is None:
            return None
        with self.noted(expected), reader, self._counters.timed("root", "read") as timed:
            timed.size_bytes = expected.payload_bytes
            try:
                if isinstance(reader, DecodedReader) or self._writer.encodings.encrypts(expected.tenant):
                    mapped: memoryview | None = read_whole(reader, expected)
                else:
                    # Verify by reads, not through the mapping: a page fault on an unreadable page would block while
                    # holding the GIL, or crash the process (SIGBUS).
                    verify_whole(reader, expected)
                    mapped = reader.map()
            except Damaged as damaged:
                self.set_aside(expected, damaged.damage)
                return None
            if mapped is None:
                self._counters.add(NodeCount.MISS_ABSENT)
                return None
            self._seen(expected, reader.stat, epoch)
        self._counters.add_read(expected.payload_bytes)
        return mapped[expected.header_bytes :]

    def stage(
        self,
        expected: Expected,
        sections: Pieces,
        stamped_s: float,
        durable: bool,
        hints: Hints,
        depth: int,
        origin: Incarnation | None = None,
    ) -> Staged:
        """Writes a chunk, the one at ``depth`` of its prompt, under a staging name of its own.

        ``stamped_s`` is the time of its stamp, ``origin`` the incarnation of its image, if it has one.
        """
        incarnation = self._writer.incarnations.fresh() if origin is None else self._writer.incarnations.renewed(origin)
        self._writer.incarnations.record()
        pieces = self._writer.encodings.pieces(expected, incarnation, sections)
        name = places.staged(self._writer.session(), next(self._writer.numbers))
        stamp = stamp_ns(stamped_s, depth, hints)
        try:
            with self._counters.timed("root", "write") as timed:
                timed.size_bytes = expected.payload_bytes
                self.root.stage(name, pieces, stamp_ns=stamp, durable=durable)
        except KVStoreError:
            self._discard(name)  # torn files must not keep a full disk full
            raise
        return Staged(name, expected, byte_length(pieces))

    def publish(self, staged: Staged, durable: bool) -> bool:
        """Gives a staged chunk its final name; False if another writer was first, whose chunk stays."""
        expected, epoch = staged.expected, self.known.epoch
        won = self.root.publish(staged.name, self._name_of(expected), durable=durable)
        if won:
            self._writer.usage.wrote(staged.size_bytes)
            self.known.add(expected.address, self.known.quantum(), renewed=True, epoch=epoch)
            self._counters.add(NodeCount.CHUNKS_WRITTEN)
            self._counters.add(NodeCount.BYTES_WRITTEN, expected.payload_bytes)
        else:
            self._counters.add(NodeCount.CHUNKS_LOST_RACE)
            with suppress(KVStoreError):  # on failure it is not remembered, and the next request looks for it
                # The winner's file may be encrypted with a key that this node lacks: then no match may promise it.
                self.look(expected)
        return won

    def discard(self, staged: Staged) -> None:
        """Removes a staged chunk that will not be published."""
        self._discard(staged.name)

    def set_aside(self, expected: Expected, damage: Damage) -> None:
        """Moves a damaged file away from its name, so that the next put can repair it. Never raises."""
        self.quarantine.set_aside(expected, self._name_of(expected), damage)

    @contextmanager
    def noted(self, expected: Expected) -> Iterator[None]:
        """Wraps a read of a chunk's file: notes a file that the root cannot read, so that nobody trusts its size."""
        try:
            yield
        except FAILED:
            self.quarantine.unreadable.failed(expected.address)
            self.known.forget(expected.address)
            raise

    def _open(self, expected: Expected) -> Reader | None:
        """Opens a chunk file of the right size; None is a miss."""
        reader = self.root.open(self._name_of(expected))
        if reader is None:
            self.known.forget(expected.address)
            self._counters.add(NodeCount.MISS_ABSENT)
            return None
        try:
            found = plain(reader, expected, self._writer.encodings)
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
                if self._writer.encodings.is_whole(reader, expected):
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
        self._counters.add(reason.counter)

    def _wrong_size(self, expected: Expected, damage: Damage = Damage.SIZE) -> None:
        """Sets aside a file of the wrong size, unless the engine asked for a block with another size than it has."""
        if expected.kind is Kind.BLOCK and self._is_block_of_other_size(expected):
            self._counters.add(NodeCount.MISS_OTHER_SIZE)
            return
        self.set_aside(expected, damage)

    def _is_block_of_other_size(self, expected: Expected) -> bool:
        reader = self.root.open(self._name_of(expected))
        if reader is None:
            return False
        with reader:
            raw = bytearray(min(expected.header_bytes + PAGE_BYTES, reader.stat.size_bytes))
            if reader.read([memoryview(raw)], 0, Borrowed()) != len(raw):
                return False
            try:
                header = decode_any(raw)
            except Damaged:
                return False
            same = (header.address, header.namespace) == (expected.address, expected.namespace)
            return same and header.kind is Kind.BLOCK and header.file_bytes == reader.stat.size_bytes

    def _seen(self, expected: Expected, stat: Stat, epoch: int) -> None:
        quantum = self.known.quantum()
        self.known.add(expected.address, quantum, renewed=is_fresh(stat.mtime_ns, quantum), epoch=epoch)

    def _discard(self, name: Name) -> None:
        try:
            self.root.discard(name)
        except KVStoreError:
            self._counters.add(NodeCount.QUARANTINE_FAILED)

    def _name_of(self, expected: Expected) -> Name:
        return places.chunk(expected.address, NamespaceId(expected.namespace[:8]), self._shard_bits)
