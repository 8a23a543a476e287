"""Encoded chunk files, read as the files of version 1 that they stand for, and the encoding of a node's writes.

A ``DecodedReader`` is a Reader like any other: its
bytes are those of a plain file, header and all. So every reader of chunks verifies them as always, and nothing leaves
here undecoded.
"""

from __future__ import annotations

import logging
import threading

from kvstore.codec import codec
from kvstore.codec.codec import EMPTY, PLAIN, Decoding, Key, KeyFile, KeyRing, Wish, decode_header, encode_chunk
from kvstore.core.buffers import BufferLoan, Pieces, byte_length
from kvstore.core.clock import Ids
from kvstore.core.metrics import Counters, NodeCount
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.format.header import (
    HEADER_BYTES_MAX,
    PAGE_BYTES,
    Damage,
    Damaged,
    Encoding,
    Expected,
    Header,
    Incarnation,
    checksum,
    decode,
    decode_encoded,
    encode,
    encoded_header_bytes,
    is_encoded,
)
from kvstore.root.interface import FileReader, Stat

log = logging.getLogger(__name__)

NAMESPACES_MAX = 1_024
"""Namespaces whose tenants a node knows: clients make as many as they like, of up to 280 KiB each."""

GAIN_BYTES_MIN = PAGE_BYTES
"""A chunk that compression makes smaller by less is stored as it is."""

_SIZE_FIELD = slice(16, 20)


class NotDecodable(Exception):
    """A whole file that this node cannot decode: a miss, counted under ``counter``, not damage."""

    def __init__(self, counter: NodeCount) -> None:
        super().__init__(counter.about)
        self.counter = counter


class Encodings:
    """The keys and encodings of one node. Thread-safe."""

    def __init__(self, keys: KeyFile | None, counters: Counters, ids: Ids, *, compress: bool = False) -> None:
        """``compress``: chunks are compressed when they are written to the root. Raises InvalidRequest without zstd."""
        if compress:
            codec.check_compression()
        self._compress = compress
        self._keys = keys
        self.is_plain = keys is None and not compress
        """True if every chunk is written as it is."""
        self._counters = counters
        self._ids = ids
        self._namespaces: dict[NamespaceDigest, Namespace] = {}
        self._learning = threading.Lock()
        if keys is not None:
            keys.noted = counters.add

    @property
    def ring(self) -> KeyRing:
        return self._keys.ring if self._keys is not None else EMPTY

    @property
    def has_keys(self) -> bool:
        """True if there may be keys: then a chunk of an unknown tenant may have to be encrypted."""
        return self._keys is not None

    def key_of(self, tenant: str) -> Key | None:
        """Returns the key that a tenant's chunks are encrypted with now."""
        return self.ring.current.get(tenant) if self._keys is not None else None

    def encrypts(self, tenant: str) -> bool:
        """True if a tenant's writes are encrypted: then its chunks are not for native code, descriptors or mappings."""
        return self.key_of(tenant) is not None

    def encodes(self, tenant: str) -> bool:
        """True if a tenant's writes are compressed or encrypted: then its chunks are not for native code."""
        return self._compress or self.encrypts(tenant)

    def pieces(self, expected: Expected, incarnation: Incarnation, sections: Pieces) -> list[memoryview]:
        """Encodes a chunk as it is written to a file now."""
        key = self.key_of(expected.tenant)
        if self._compress:
            pieces = self._encoded(expected, incarnation, sections, Wish(True, key))
            saved_bytes = expected.payload_bytes - byte_length(pieces[1:])
            if saved_bytes >= GAIN_BYTES_MIN:
                self._counters.add(NodeCount.COMPRESSED_SAVED_BYTES, saved_bytes)
                return pieces
        return self._encoded(expected, incarnation, sections, Wish(key=key))

    def _encoded(self, expected: Expected, incarnation: Incarnation, sections: Pieces, wish: Wish) -> list[memoryview]:
        if wish == PLAIN:
            header = encode(expected, incarnation, list(map(checksum, sections)))
            return [memoryview(header), *sections]
        pieces = encode_chunk(expected, incarnation, sections, wish, self._ids.fresh() if wish.key else b"")
        if wish.key:
            self._counters.add(NodeCount.BYTES_ENCRYPTED, expected.payload_bytes)
        return pieces

    def learn(self, namespace: Namespace) -> None:
        """Remembers a namespace whose chunks come into memory, so that its tenant is known when they go to the disk."""
        if namespace.digest in self._namespaces:
            return
        with self._learning:
            while len(self._namespaces) >= NAMESPACES_MAX:
                # Namespaces in use are learned again soon; until then their images do not go to the disk.
                del self._namespaces[next(iter(self._namespaces))]
            self._namespaces[namespace.digest] = namespace

    def pieces_of_image(self, header: Header, image: memoryview) -> list[memoryview] | None:
        """Encodes an image as it is written to a local disk, keeping its checksums.

        None if its tenant is unknown, because it may have to be encrypted.
        """
        if self._keys is None:
            return [image]
        namespace = self._namespaces.get(header.namespace)
        if namespace is None:
            return None
        key = self.key_of(namespace.tenant)
        if key is None:
            return [image]
        size = header.section_bytes
        payload = image[header.header_bytes :]
        sections = [payload[at * size : (at + 1) * size] for at in range(len(header.checksums))]
        expected = Expected(
            header.kind,
            header.address,
            header.parent,
            header.namespace,
            header.depth,
            header.identity,
            len(header.checksums),
            size,
        )
        self._counters.add(NodeCount.BYTES_ENCRYPTED, expected.payload_bytes)
        return encode_chunk(expected, header.incarnation, sections, Wish(key=key), self._ids.fresh(), header.checksums)

    def reader(self, reader: FileReader, expected: Expected) -> DecodedReader | None:
        """Returns the plain file that an encoded one stands for; None if the file has version 1 or none.

        Owns ``reader`` only if it does not return None. Raises Damaged, NotDecodable, and the root's errors.
        """
        found = _header_of(reader, expected)
        return None if found is None else DecodedReader(reader, self._decoding(*found), expected.section_bytes)

    def is_whole(self, reader: FileReader, expected: Expected) -> bool | None:
        """True if an encoded file is of the chunk and of the right size, and this node could decode it; None if it is
        not encoded.

        Reads only the header, without decrypting it. Raises Damaged, NotDecodable.
        """
        found = _header_of(reader, expected)
        if found is None:
            return None
        self._key_for(found[1])
        return True

    def header_of(self, reader: FileReader) -> tuple[Header, Decoding] | None:
        """Returns the plain header of any file, and how to decode the rest.

        None if it is not encoded. Raises Damaged, NotDecodable.
        """
        raw = read_header(reader)
        if not is_encoded(raw):
            return None
        header = decode_encoded(raw)
        if header.file_bytes != reader.stat.size_bytes:
            raise Damaged(Damage.SIZE)
        decoding = self._decoding(raw, header)
        return decode(decoding.plain_header), decoding

    def _decoding(self, raw: bytearray, header: Header) -> Decoding:
        return Decoding(raw, header, self._key_for(header))

    def _key_for(self, header: Header) -> Key | None:
        """Returns the key that a header names; None if it names none. Raises NotDecodable."""
        if Encoding.COMPRESSED in header.encoding and not codec.is_available():
            log.warning("chunks.compressed a chunk is compressed: pip install 'kvstore-llm[compression]'")
            raise NotDecodable(NodeCount.MISS_ENCODING)
        if Encoding.ENCRYPTED not in header.encoding:
            return None
        key = self.ring.by_id.get(header.key_id)
        if key is None:
            raise NotDecodable(NodeCount.MISS_KEY)
        return key


def read_header(reader: FileReader) -> bytearray:
    """Reads at least the header of any file. Raises Damaged if the file is too short."""
    raw = _read(reader, PAGE_BYTES)
    size = int.from_bytes(raw[_SIZE_FIELD], "little")
    return _read(reader, size) if PAGE_BYTES < size <= HEADER_BYTES_MAX else raw


def _header_of(reader: FileReader, expected: Expected) -> tuple[bytearray, Header] | None:
    """Reads the header of an encoded file that should be of this chunk; None if it is not encoded. Raises Damaged."""
    raw = _read(reader, encoded_header_bytes(len(expected.identity), expected.section_count) + PAGE_BYTES)
    if not is_encoded(raw):
        return None
    header = decode_header(raw, expected)
    if header.file_bytes != reader.stat.size_bytes:
        raise Damaged(Damage.SIZE)
    return raw, header


def _read(reader: FileReader, size_bytes: int) -> bytearray:
    raw = bytearray(min(size_bytes, reader.stat.size_bytes))
    if reader.read([memoryview(raw)], 0, BufferLoan()) != len(raw):
        raise Damaged(Damage.SIZE)
    return raw


class DecodedReader(FileReader):
    """Implements ``FileReader``: the file of version 1 that an encoded one stands for. ``read`` raises Damaged as
    well.
    """

    def __init__(self, reader: FileReader, decoding: Decoding, section_bytes: int) -> None:
        self._reader = reader
        self._decoding = decoding
        self._header = memoryview(decoding.plain_header)
        self._section_bytes = section_bytes
        size = len(self._header) + len(decoding.header.stored) * section_bytes
        self.stat = Stat(size, reader.stat.mtime_ns)
        self._last: tuple[int, memoryview] | None = None
        """The section decoded last, kept if only a part of it was asked for."""
        self._scratch = memoryview(b"")

    @property
    def header(self) -> Header:
        return self._decoding.header

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        """Fills ``pieces``, however they are cut; whole sections cost least."""
        at, end = offset, min(offset + byte_length(pieces), self.stat.size_bytes)
        for piece in pieces:
            stop = min(len(piece), end - at)
            done = 0
            while done < stop:
                count = self._fill(piece[done:stop], at, borrowed)
                done += count
                at += count
        return max(0, at - offset)

    def close(self) -> None:
        self._reader.close()

    def _fill(self, piece: memoryview, at: int, borrowed: BufferLoan) -> int:
        """Fills the beginning of ``piece``, up to the end of the header or section that contains byte ``at``."""
        before, size = len(self._header), self._section_bytes
        if at < before:
            part = self._header[at : at + len(piece)]
        else:
            index, start = divmod(at - before, size)
            if not start and len(piece) >= size:
                stored = self._stored(index)
                with borrowed.writing():
                    self._decoding.section(index, stored, piece[:size])
                return size
            part = self._section(index)[start : start + len(piece)]
        with borrowed.writing():
            piece[: len(part)] = part
        return len(part)

    def _section(self, index: int) -> memoryview:
        """Returns a section when a caller reads only part of it, and keeps it: the next read often wants the rest."""
        if self._last is None or self._last[0] != index:
            section = memoryview(bytearray(self._section_bytes))
            self._decoding.section(index, self._stored(index), section)
            self._last = (index, section)
        return self._last[1]

    def _stored(self, index: int) -> memoryview:
        """Returns a section as it is stored, in memory that the next call reuses."""
        offset, size_bytes = self._decoding.where(index)
        if len(self._scratch) < size_bytes:
            self._scratch = memoryview(bytearray(size_bytes))
        stored = self._scratch[:size_bytes]
        if self._reader.read([stored], offset, BufferLoan()) != size_bytes:
            raise Damaged(Damage.SIZE)
        return stored
