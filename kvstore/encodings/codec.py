"""Encodes a chunk to the bytes of its file, and decodes it part by part. Pure except for the libraries it calls.

Separate from the format, which says where the bytes lie, and from nodes, which choose the encoding and do the I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.buffers import Pieces, ReadBuffer
from kvstore.encodings import squeezing
from kvstore.encodings.keys import Key
from kvstore.encodings.sealing import HEADER_PART, Seal
from kvstore.format.checksum import checksum
from kvstore.format.encoded import (
    TAG_BYTES,
    Encoding,
    decode_encoded,
    encode_fixed,
    encode_header,
    inner_of,
    plain_header,
    sealed_of,
)
from kvstore.format.header import FIXED_BYTES, Damage, Damaged, Expected, Header, Incarnation, Stored, inner


@dataclass(frozen=True, slots=True)
class Wish:
    """The wanted encoding of a chunk."""

    compress: bool = False
    key: Key | None = None

    @property
    def encoding(self) -> Encoding:
        """The encoding as the header states it."""
        compressed = Encoding.COMPRESSED if self.compress else Encoding.PLAIN
        return compressed | (Encoding.ENCRYPTED if self.key else Encoding.PLAIN)


PLAIN = Wish()


def encode_chunk(
    expected: Expected,
    incarnation: Incarnation,
    sections: Pieces,
    wish: Wish,
    salt: bytes,
    checksums: Sequence[int] | None = None,
) -> list[memoryview]:
    """Returns the bytes of an encoded file, in pieces. ``salt`` is 16 random bytes that were never used before.

    ``checksums`` are the known checksums of the sections, if any: they reveal bytes that changed since.
    """
    assert wish.encoding and len(sections) == expected.section_count
    encoding, key = wish.encoding, wish.key
    over = TAG_BYTES if key else 0
    parts: list[bytes | memoryview] = list(sections)
    if wish.compress:
        parts = [squeezing.squeeze(section, expected.itemsize) for section in sections]
    payload_bytes = sum(map(len, parts)) + over * len(parts)
    fixed = encode_fixed(expected, incarnation, encoding, key.id if key else b"", payload_bytes)
    content: bytes = inner(expected, list(map(checksum, sections)) if checksums is None else checksums)
    if key:
        seal = Seal(key.secret, salt, fixed)
        parts = [seal.close(at, part) for at, part in enumerate(parts)]
        content = seal.close(HEADER_PART, content)
    stored = [Stored(checksum(part), len(part)) for part in parts]
    # A descent has tokens, which an encrypted file shows to nobody without the key: it is left out.
    header = encode_header(fixed, content, salt if key else b"", stored, b"" if key else expected.descent)
    return [memoryview(header), *[memoryview(part) for part in parts]]


class Decoding:
    """An encoded file whose header is known and, if it is encrypted, decrypted. Thread-safe."""

    __slots__ = ("_offsets", "_seal", "header", "plain_header")

    def __init__(self, raw: ReadBuffer, header: Header, key: Key | None) -> None:
        """``raw`` is the whole header, ``header`` its fields, ``key`` the key that it names. Raises Damaged."""
        self.header = header
        sealed, salt = sealed_of(raw)
        self._seal = Seal(key.secret, salt, bytes(raw[:FIXED_BYTES])) if key else None
        content = self._seal.open(HEADER_PART, sealed) if self._seal else inner_of(raw)
        self.plain_header = bytes(plain_header(raw, content))
        """The header of version 1 that this one stands for."""
        offsets, at = [], header.header_bytes
        for each in header.stored:
            offsets.append(at)
            at += each.size_bytes
        self._offsets = offsets

    def where(self, index: int) -> tuple[int, int]:
        """Returns offset and size of a stored section."""
        return self._offsets[index], self.header.stored[index].size_bytes

    def section(self, index: int, stored: memoryview, section: memoryview) -> None:
        """Decodes a stored section into memory of its size. Raises Damaged, which leaves that memory undefined."""
        if checksum(stored) != self.header.stored[index].checksum:
            raise Damaged(Damage.SECTION_CHECKSUM)
        opened: ReadBuffer = self._seal.open(index, stored) if self._seal else stored
        if Encoding.COMPRESSED in self.header.encoding:
            squeezing.stretch(opened, section, self.header.itemsize)
        else:
            section[:] = opened


def decode_header(raw: ReadBuffer, expected: Expected) -> Header:
    """Decodes the header of an encoded file that must be of the chunk ``expected``, as far as it shows without a key.

    Raises Damaged.
    """
    header = decode_encoded(raw)
    names = (header.kind, header.address, header.parent, header.namespace, header.depth)
    if names != (expected.kind, expected.address, expected.parent, expected.namespace, expected.depth):
        raise Damaged(Damage.IDENTITY)
    if header.section_bytes != expected.section_bytes or len(header.stored) != expected.section_count:
        raise Damaged(Damage.GEOMETRY)
    return header
