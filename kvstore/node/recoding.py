"""Recoding: writes a stored chunk again, compressed, decompressed or with another key (FORMAT.md, W5).

Separate from puts, which never replace a file. Nobody waits for it: readers that have the old file open go on with it,
and it stays where it can be read until every hold that may know of it has ended.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.address import NO_PARENT, Address
from kvstore.brief import size
from kvstore.buffers import Borrowed, byte_length
from kvstore.counts import NodeCount
from kvstore.encodings import squeezing
from kvstore.encodings.codec import Wish
from kvstore.encodings.keys import Key
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded
from kvstore.format import places
from kvstore.format.checksum import checksum
from kvstore.format.encoded import TAG_BYTES
from kvstore.format.header import (
    FIXED_BYTES,
    PAGE_BYTES,
    Damage,
    Damaged,
    Encoding,
    Expected,
    Header,
    Kind,
    decode,
    incarnation_at,
    is_self_consistent,
)
from kvstore.format.places import Name
from kvstore.layout import CHUNK_BYTES_MAX
from kvstore.namespace import Namespace, NamespaceDigest, NamespaceId
from kvstore.node.counters import Counters
from kvstore.node.encoded import DecodedReader, Encodings, NotDecodable, read_header
from kvstore.node.incarnations import Incarnations
from kvstore.node.lanes import moved_on
from kvstore.node.view import View
from kvstore.root.interface import Reader, Root, Seen
from kvstore.sources import Clock

ASIDE_SHARE = 1 / 4
"""Share of the root's free space that replaced files may take while they must not go yet."""


class Recoding(enum.Enum):
    """The wanted change; in each case the new file is encrypted as the key file says now."""

    COMPRESS = "compress"
    DECOMPRESS = "decompress"
    REENCRYPT = "reencrypt"


class Outcome(enum.Enum):
    """The outcome for one chunk."""

    REWRITTEN = "rewritten"
    KEPT = "kept"
    """It is as wanted already, or would not become smaller."""
    GONE = "gone"
    CONDEMNED = "condemned"
    """A collector is taking it."""
    NO_KEY = "no_key"
    """It is encrypted with a key that this node lacks, or its tenant is unknown."""
    DAMAGED = "damaged"
    """It stays where it is, for the next read or ``fsck`` to set aside."""
    CHANGED = "changed"
    """Another file took its name meanwhile."""


@dataclass(frozen=True, slots=True)
class Recoded:
    """The result for one chunk; sizes are those of whole files, and equal if it was not rewritten."""

    outcome: Outcome
    before_bytes: int = 0
    after_bytes: int = 0


class Recoder:
    """Recodes chunks for one node. Thread-safe; called on lanes."""

    def __init__(
        self,
        root: Root,
        encodings: Encodings,
        incarnations: Incarnations,
        view: View,
        counters: Counters,
        clock: Clock,
        session: Callable[[], bytes],
        numbers: Iterator[int],
        find_namespace: Callable[[NamespaceDigest], Namespace | None],
        *,
        hold_max_s: float,
        durable: bool,
    ) -> None:
        self._root = root
        self._encodings = encodings
        self._incarnations = incarnations
        self._view = view
        self._counters = counters
        self._clock = clock
        self._session = session
        self._numbers = numbers
        self._find_namespace = find_namespace
        self._hold_max_s = hold_max_s
        self._durable = durable
        self._lock = threading.Lock()
        self._asides: deque[tuple[float, Name, int]] = deque()
        self._aside_bytes = 0

    @property
    def has_asides(self) -> bool:
        """True if ``sweep`` may have something to do."""
        return bool(self._asides)

    def recode(self, name: Name, act: Recoding) -> Recoded:
        """See ``recode``."""
        identity = _identity_of(name)
        if act is Recoding.COMPRESS:
            squeezing.check_available()
        elif self._view.is_full:
            raise Overloaded("the root is full until garbage collection has made room: go on later")
        self.sweep()
        if self._view.condemns(identity[0]):
            return Recoded(Outcome.CONDEMNED)
        seen = self._root.look(name, FIXED_BYTES)
        reader = self._root.open(name) if seen is not None else None
        if seen is None or reader is None:
            return Recoded(Outcome.GONE)
        with reader:
            pieces = self._read_again(reader, identity, seen, act)
        if isinstance(pieces, Recoded):
            return pieces
        # To compress makes room, and is what a full root may need.
        with self._view.usage.reserve(0 if act is Recoding.COMPRESS else byte_length(pieces)):
            return self._replaced(name, seen, pieces)

    def _read_again(
        self, reader: Reader, identity: tuple[Address, NamespaceId], seen: Seen, act: Recoding
    ) -> list[memoryview] | Recoded:
        """The bytes of the new file, or the outcome where there is nothing to write."""
        before_bytes = seen.stat.size_bytes
        try:
            found = _Found.of(reader, self._encodings)
            if incarnation_at(seen.prefix) != found.stored.incarnation:
                return Recoded(Outcome.CHANGED)
            if (found.plain.address, found.plain.namespace[: len(identity[1])]) != identity:
                raise Damaged(Damage.IDENTITY)
            wish = self._wish(found, act)
            pieces = None if wish is None else self._pieces(found, wish)
        except NotDecodable:
            return Recoded(Outcome.NO_KEY, before_bytes, before_bytes)
        except Damaged:
            return Recoded(Outcome.DAMAGED, before_bytes, before_bytes)
        return Recoded(Outcome.KEPT, before_bytes, before_bytes) if pieces is None else pieces

    def sweep(self, *, even_held: bool = False) -> bool:
        """Removes the replaced files that nobody can be reading any more, or, with ``even_held``, all. Always True.

        Never raises KVStoreError.
        """
        while True:
            with self._lock:
                if not self._asides or (self._asides[0][0] > self._clock.monotonic_s() and not even_held):
                    return True
                until_s, name, size_bytes = self._asides.popleft()
                self._aside_bytes -= size_bytes
            try:
                if self._root.remove(name):
                    self._view.usage.removed(size_bytes)
            except KVStoreError:
                with self._lock:  # the next sweep tries again: else it would stay as long as the session lives
                    self._asides.appendleft((until_s, name, size_bytes))
                    self._aside_bytes += size_bytes
                return True

    def _wish(self, found: _Found, act: Recoding) -> Wish | None:
        """Returns the target encoding, or None if the file already has it. Raises NotDecodable without a tenant."""
        key, is_compressed = self._key(found.plain), Encoding.COMPRESSED in found.stored.encoding
        compress = is_compressed if act is Recoding.REENCRYPT else act is Recoding.COMPRESS
        wish = Wish(compress, key)
        key_id = key.id if key else b""
        return None if (wish.encoding, key_id) == (found.stored.encoding, found.stored.key_id) else wish

    def _key(self, header: Header) -> Key | None:
        if not self._encodings.has_keys:
            return None
        namespace = self._namespace_of(header)
        if namespace is None:
            raise NotDecodable(NodeCount.MISS_KEY)  # rather than write it as plain text
        return self._encodings.key_of(namespace.tenant)

    def _namespace_of(self, header: Header) -> Namespace | None:
        known = self._encodings.namespace_of(header.namespace)
        if known is None:
            known = self._find_namespace(header.namespace)
            if known is not None:
                self._encodings.learn(known)
        return known

    def _pieces(self, found: _Found, wish: Wish) -> list[memoryview] | None:
        """Returns the bytes of the new file; None if nothing would be gained. Raises Damaged."""
        expected = found.expected(self._namespace_of(found.plain))
        sections = found.sections()
        moved_on()
        incarnation = self._incarnations.renewed(found.stored.incarnation)
        pieces = self._encodings.encoded(expected, incarnation, sections, wish)
        if not wish.compress:
            return pieces
        payload_bytes = expected.payload_bytes + (TAG_BYTES * expected.section_count if wish.key else 0)
        if byte_length(pieces[1:]) + PAGE_BYTES <= payload_bytes:
            return pieces
        # Compression gains nothing: write it uncompressed, unless it already is.
        plain = Wish(key=wish.key)
        if (plain.encoding, wish.key.id if wish.key else b"") == (found.stored.encoding, found.stored.key_id):
            return None
        return self._encodings.encoded(expected, incarnation, sections, plain)

    def _replaced(self, name: Name, seen: Seen, pieces: list[memoryview]) -> Recoded:
        before_bytes, after_bytes = seen.stat.size_bytes, byte_length(pieces)
        moved_on()
        self._check_room(before_bytes)
        session = self._session()
        until_s = math.ceil(self._clock.now_s() + self._hold_max_s)
        staged = places.staged(session, next(self._numbers))
        aside = places.replaced(session, next(self._numbers), until_s)
        try:
            # Keep the old file's time, so that the new one seems used neither later nor more often.
            self._root.stage(staged, pieces, stamp_ns=seen.stat.mtime_ns, durable=self._durable)
            replaced = self._root.replace(staged, name, seen, aside, durable=self._durable)
        except BaseException:
            self._discard(staged)
            self._discard(aside)
            raise
        if not replaced:
            self._discard(staged)
            return Recoded(Outcome.CHANGED, before_bytes, before_bytes)
        self._view.usage.wrote(after_bytes)  # the old file keeps its room until ``sweep`` removes it
        with self._lock:
            self._asides.append((self._clock.monotonic_s() + self._hold_max_s, aside, before_bytes))
            self._aside_bytes += before_bytes
        self._keep_time(name, seen, aside)
        self._counters.add(NodeCount.CHUNKS_RECODED)
        self._counters.add(NodeCount.RECODED_SAVED_BYTES, max(0, before_bytes - after_bytes))
        return Recoded(Outcome.REWRITTEN, before_bytes, after_bytes)

    def _keep_time(self, name: Name, seen: Seen, aside: Name) -> None:
        """Renews the new file's time if the old file was used since we looked at it."""
        try:
            old = self._root.stat(aside)
            if old is not None and old.mtime_ns > seen.stat.mtime_ns:
                self._root.touch(name, old.mtime_ns)
        except KVStoreError:
            return  # one renewal is lost, as when a node ends

    def _check_room(self, size_bytes: int) -> None:
        """Raises Overloaded if files replaced lately take too much of the root."""
        free_bytes = self._root.space().free_bytes
        with self._lock:
            aside_bytes = self._aside_bytes
        if aside_bytes and free_bytes is not None and aside_bytes + size_bytes > free_bytes * ASIDE_SHARE:
            raise Overloaded(
                f"{size(aside_bytes)} of replaced files wait for holds to end, at most {self._hold_max_s:g} s, and the "
                f"root has {size(free_bytes)} left: go on later"
            )

    def _discard(self, name: Name) -> None:
        try:
            self._root.discard(name)
        except KVStoreError:
            self._counters.add(NodeCount.QUARANTINE_FAILED)


def _identity_of(name: Name) -> tuple[Address, NamespaceId]:
    """The address and namespace that a chunk's name says. Raises InvalidRequest for any other name."""
    identity = places.parse_chunk(name.rpartition("/")[2])
    if identity is None or not name.startswith(f"{places.CHUNKS}/"):
        raise InvalidRequest(f"{name!r} is no chunk: expected {places.CHUNKS}/SHARD/ADDRESS.NAMESPACE")
    return identity


@dataclass(frozen=True, slots=True)
class _Found:
    """A stored chunk: its header as stored and as of version 1, and the reader of its plain bytes."""

    stored: Header
    plain: Header
    reader: Reader

    @classmethod
    def of(cls, reader: Reader, encodings: Encodings) -> _Found:
        """Reads the headers of a file. Raises Damaged, NotDecodable."""
        opened = encodings.header_of(reader)
        if opened is not None:
            plain, decoding = opened
            found = cls(decoding.header, plain, DecodedReader(reader, decoding, plain.section_bytes))
        else:
            header = decode(read_header(reader))
            if header.file_bytes != reader.stat.size_bytes:
                raise Damaged(Damage.SIZE)
            found = cls(header, header, reader)
        if not is_self_consistent(found.plain):
            raise Damaged(Damage.IDENTITY)
        # A compressed file may claim sections of any size, and nothing else limits them here.
        if len(found.plain.checksums) * found.plain.section_bytes > CHUNK_BYTES_MAX:
            raise Damaged(Damage.GEOMETRY)
        return found

    def expected(self, namespace: Namespace | None) -> Expected:
        """Returns what the new file must hold."""
        plain = self.plain
        return Expected(
            plain.kind,
            plain.address,
            plain.parent if plain.kind is Kind.TOKENS else NO_PARENT,
            plain.namespace,
            plain.depth,
            plain.identity,
            len(plain.checksums),
            plain.section_bytes,
            namespace.tenant if namespace else "",
            namespace.layout.itemsize if namespace else self.stored.itemsize,
            plain.descent,
        )

    def sections(self) -> list[memoryview]:
        """Returns all sections, verified. Raises Damaged."""
        plain, size = self.plain, self.plain.section_bytes
        payload = memoryview(bytearray(len(plain.checksums) * size))
        sections = [payload[at * size : (at + 1) * size] for at in range(len(plain.checksums))]
        if self.reader.read(sections, plain.header_bytes, Borrowed()) != len(payload):
            raise Damaged(Damage.SIZE)
        if tuple(map(checksum, sections)) != plain.checksums:
            raise Damaged(Damage.SECTION_CHECKSUM)
        return sections
