"""The header of a chunk file: encodes and decodes its fields, and decides whether it is the wanted chunk.

This is version 1, whose sections are stored unchanged; ``encoded.py`` does version 2. ``FORMAT.md`` beside this file is
the normative description; this is its only implementation. Pure: no I/O, no clock.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NewType

from kvstore.address import (
    ADDRESS_BYTES,
    NO_PARENT,
    Address,
    Chain,
    block_address,
    chunk_address,
    hashed_block_address,
)
from kvstore.buffers import ReadBuffer
from kvstore.format.checksum import XXH3_64, checksum
from kvstore.format.descent import read_descent, write_descent
from kvstore.namespace import Namespace, NamespaceDigest

Incarnation = NewType("Incarnation", bytes)

MAGIC = b"\x93KVCHNK\n"
VERSION = 1
BLAKE2B_128 = 1
PAGE_BYTES = 4096

_FIXED = struct.Struct("<8sHBBB3xIIIIQ16s16s32s16s8x")
_SUM = struct.Struct("<Q")
assert _FIXED.size == 128
FIXED_BYTES = _FIXED.size
INCARNATION_AT = 104


class Encoding(enum.IntFlag):
    """The encodings of the sections of a chunk file; all but PLAIN have version 2 (``encoded.py``)."""

    PLAIN = 0
    COMPRESSED = 1
    """Byte planes apart, then zstd, section by section."""
    ENCRYPTED = 2
    """AES-256-GCM of each section and of the identity."""


class Kind(enum.IntEnum):
    """The kinds of identity of a chunk file."""

    TOKENS = 0
    """Identity is the chunk's tokens as u32; the address chains from the parent's."""
    BLOCK = 1
    """Identity is the engine's own hash; no parent, one section."""


class Damage(enum.Enum):
    """Reasons why a file is not the wanted chunk. Each is a miss, counted under its value."""

    SIZE = "size"
    MAGIC = "magic"
    VERSION = "version"
    ALGORITHM = "algorithm"
    HEADER_CHECKSUM = "header_checksum"
    IDENTITY = "identity"
    GEOMETRY = "geometry"
    SECTION_CHECKSUM = "section_checksum"
    SEAL = "seal"
    """Encrypted bytes that their key does not open: forged, moved here, or damaged before they were written."""
    ENCODING = "encoding"
    """Compressed bytes that are whole, but do not give the section."""


class Damaged(Exception):
    """A file that is not what it should be. Never leaves the node, where it becomes a miss."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage.value)
        self.damage = damage


@dataclass(frozen=True, slots=True)
class Expected:
    """Everything known of a chunk before its file is opened: its content and its size."""

    kind: Kind
    address: Address
    parent: Address
    namespace: NamespaceDigest
    depth: int
    identity: bytes
    section_count: int
    section_bytes: int
    tenant: str = ""
    """The chunk's tenant, which decides whether it is encrypted, and with which keys."""
    itemsize: int = 1
    """Bytes of one element, whose byte planes are compressed separately."""
    descent: bytes = b""
    """What a writer says of a block's descent; readers expect nothing of it."""

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload, a multiple of 4096."""
        return header_bytes(len(self.identity), self.section_count)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all sections."""
        return self.section_count * self.section_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.header_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A section as it lies in an encoded file."""

    checksum: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header: the file's own description of itself."""

    kind: Kind
    address: Address
    parent: Address
    namespace: NamespaceDigest
    incarnation: Incarnation
    depth: int
    identity: bytes
    """Empty if it is encrypted."""
    section_bytes: int
    checksums: tuple[int, ...]
    """Checksums of the sections as they were put; empty if they are encrypted."""
    header_bytes: int
    encoding: Encoding = Encoding.PLAIN
    itemsize: int = 1
    key_id: bytes = b""
    """Id of the key that it is encrypted with; empty if it is not encrypted."""
    stored: tuple[Stored, ...] = ()
    """Each section as it lies in the file; empty if sections are stored unchanged."""
    descent: bytes = b""
    """What the writer of a block says of its descent (``descent.py``): a claim. Empty for none, and if encrypted."""

    @property
    def file_bytes(self) -> int:
        """Bytes that the whole file must have."""
        if self.encoding:
            return self.header_bytes + sum(each.size_bytes for each in self.stored)
        return self.header_bytes + len(self.checksums) * self.section_bytes


def expected_chunk(chain: Chain, index: int) -> Expected:
    """Returns what the file of chunk ``index`` of a chain must hold."""
    layout = chain.namespace.layout
    return Expected(
        Kind.TOKENS,
        chain.parent(index + 1),  # its own address
        chain.parent(index),
        chain.namespace.digest,
        index,
        bytes(chain.chunk_tokens(index)),
        layout.section_count,
        layout.section_bytes,
        chain.namespace.tenant,
        layout.itemsize,
    )


def expected_block(namespace: Namespace, key: bytes, size_bytes: int, descent: bytes = b"") -> Expected:
    """Returns what the file of an engine-hashed block of ``size_bytes`` must hold; a writer adds its ``descent``."""
    return Expected(
        Kind.BLOCK,
        block_address(namespace, key),
        NO_PARENT,
        namespace.digest,
        0,
        key,
        1,
        size_bytes,
        namespace.tenant,
        namespace.layout.itemsize,
        descent,
    )


@lru_cache  # the chunks of a namespace have one size, and every step of a call asks for it
def header_bytes(identity_bytes: int, section_count: int) -> int:
    """Returns the size of a header: fixed part, identity, section table and checksum, rounded up to pages."""
    used = _FIXED.size + _padded(identity_bytes) + _SUM.size * section_count + _SUM.size
    return -(-used // PAGE_BYTES) * PAGE_BYTES


def encode(expected: Expected, incarnation: Incarnation, section_checksums: list[int]) -> bytearray:
    """Encodes a header. ``section_checksums`` has one entry per section, in order."""
    assert len(section_checksums) == expected.section_count
    assert len(incarnation) == ADDRESS_BYTES
    names = b"".join((expected.address, expected.parent, expected.namespace, incarnation))
    return encode_parts(
        expected.kind,
        expected.depth,
        len(expected.identity),
        expected.section_count,
        expected.section_bytes,
        names,
        inner(expected, section_checksums),
        expected.descent,
    )


def inner_bytes(identity_bytes: int, section_count: int) -> int:
    """Returns the size of identity and section table, which lie between the fixed part and the padding."""
    return _padded(identity_bytes) + _SUM.size * section_count


def inner(expected: Expected, section_checksums: Sequence[int]) -> bytes:
    """Returns identity and section table, as they lie behind the fixed part."""
    table = struct.pack(f"<{expected.section_count}Q", *section_checksums)
    return expected.identity.ljust(_padded(len(expected.identity)), b"\0") + table


def encode_parts(
    kind: Kind,
    depth: int,
    identity_bytes: int,
    section_count: int,
    section_bytes: int,
    names: bytes,
    inner: ReadBuffer,
    descent: bytes,
) -> bytearray:
    """Encodes a header from its fields; ``names`` are address, parent, namespace digest and incarnation."""
    size = header_bytes(identity_bytes, section_count)
    header = bytearray(size)
    numbers = (VERSION, XXH3_64, BLAKE2B_128, kind, size, depth, identity_bytes, section_count, section_bytes)
    _FIXED.pack_into(header, 0, MAGIC, *numbers, names[:16], names[16:32], names[32:64], names[64:])
    header[FIXED_BYTES : FIXED_BYTES + len(inner)] = inner
    if descent:
        write_descent(header, FIXED_BYTES + len(inner), descent)
    _SUM.pack_into(header, size - _SUM.size, checksum(memoryview(header)[: -_SUM.size]))
    return header


def decode(header: ReadBuffer) -> Header:
    """Decodes the fields of a header. ``header`` holds at least the whole header; the rest is ignored.

    Raises Damaged if it is not a header of this version, or its checksum does not match.
    """
    if len(header) < PAGE_BYTES:
        raise Damaged(Damage.SIZE)
    fields = _FIXED.unpack_from(header)
    magic, version, *algorithms, kind = fields[:5]
    size, depth, identity_bytes, section_count, section_bytes = fields[5:10]
    address, parent, namespace, incarnation = fields[10:]
    if magic != MAGIC:
        raise Damaged(Damage.MAGIC)
    if version != VERSION:
        raise Damaged(Damage.VERSION)
    if algorithms != [XXH3_64, BLAKE2B_128] or kind not in (Kind.TOKENS, Kind.BLOCK):
        raise Damaged(Damage.ALGORITHM)
    # Check the size against the given bytes before use, so that a damaged size reads no other memory.
    if size != header_bytes(identity_bytes, section_count) or size > len(header):
        raise Damaged(Damage.GEOMETRY)
    view = memoryview(header)
    if _SUM.unpack_from(header, size - _SUM.size)[0] != checksum(view[: size - _SUM.size]):
        raise Damaged(Damage.HEADER_CHECKSUM)
    table = _FIXED.size + _padded(identity_bytes)
    behind = table + _SUM.size * section_count
    has_descent = kind == Kind.BLOCK and any(view[behind : behind + 2])
    return Header(
        Kind(kind),
        Address(address),
        Address(parent),
        NamespaceDigest(namespace),
        Incarnation(incarnation),
        depth,
        bytes(view[_FIXED.size : _FIXED.size + identity_bytes]),
        section_bytes,
        struct.unpack_from(f"<{section_count}Q", header, table),
        size,
        descent=read_descent(header, behind, size) if has_descent else b"",
    )


def decode_as(header: ReadBuffer, expected: Expected) -> Header:
    """Decodes a header that must be that of ``expected``. Raises Damaged if it is not."""
    found = decode(header)
    if not matches(found, expected):
        raise Damaged(Damage.IDENTITY)
    if found.section_bytes != expected.section_bytes or len(found.checksums) != expected.section_count:
        raise Damaged(Damage.GEOMETRY)
    return found


def matches(header: Header, expected: Expected) -> bool:
    """True if a header says that it is the wanted chunk, whatever its geometry."""
    return (
        header.kind == expected.kind
        and header.address == expected.address
        and header.parent == expected.parent
        and header.namespace == expected.namespace
        and header.depth == expected.depth
        and header.identity == expected.identity
    )


def incarnation_at(prefix: ReadBuffer) -> Incarnation:
    """Returns the bytes at the incarnation's place in a file that begins with ``prefix``; fewer if ``prefix`` is
    shorter.

    Not verified. It tells files under one name apart, whole or damaged: two publications never share it.
    """
    return Incarnation(bytes(memoryview(prefix)[INCARNATION_AT : INCARNATION_AT + ADDRESS_BYTES]))


def is_self_consistent(header: Header) -> bool:
    """True if address, namespace and identity of a header belong together, as far as the file alone can show.

    For ``fsck``: a header written by kvstore always satisfies it, whatever name the file has now. An encrypted header
    does not show it.
    """
    if Encoding.ENCRYPTED in header.encoding:
        return True
    if header.kind is Kind.TOKENS:
        return chunk_address(header.namespace, header.parent, header.identity) == header.address
    return hashed_block_address(header.namespace, header.identity) == header.address


def _padded(count: int) -> int:
    """Returns ``count`` rounded up to 8, so that the section table is aligned."""
    return -(-count // 8) * 8
