"""The header of a chunk file: encodes and decodes its fields, and decides whether it is the wanted chunk.

Sections of version 1 are stored unchanged; those of version 2 are compressed, encrypted, or both. ``FORMAT.md`` in this
folder is the normative description; this is its only implementation. Pure: no I/O, no clock.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NewType

import numpy as np
import xxhash

from kvstore.core.address import (
    ADDRESS_BYTES,
    BLOCK_KEY_BYTES_MAX,
    BLOCK_KEY_BYTES_MIN,
    NO_PARENT,
    Address,
    Tokens,
    block_address,
    chunk_address,
    hashed_block_address,
)
from kvstore.core.buffers import ReadBuffer, token_array
from kvstore.core.layout import CHUNK_TOKENS_MAX, LAYERS_MAX
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.core.validate import brief, parse_json
from kvstore.errors import InvalidRequest, RootMismatch

# Checksums of headers and sections: XXH3-64 (seed 0), chosen for its speed, not against an adversary.
#
# The keyed addresses protect against an adversary; a checksum finds the damage that disks, memory and networks do.


XXH3_64 = 1

checksum = xxhash.xxh3_64_intdigest
"""XXH3-64 of one contiguous buffer, as an unsigned integer."""


# The descent of an engine-hashed block: what its writer says of the tokens, the block before it and the engine's
# hash.
#
# It lies in the padding of a block's header (FORMAT.md, 4.7). It proves nothing, and no reader of a block looks at it:
# it is for publishers of events alone.


DESCENT_BYTES_MAX = 3_584
"""Limit of one descent as bytes: it fits behind the longest key in a header of 4096 bytes of either version."""
EXTRA_BYTES_MAX = 1_024
HASH_BYTES_MIN = 8

_NUMBERS = ("depth", "hash_bytes", "group")
_BYTES = ("parent", "extra")
_DESCENT_FIXED = struct.Struct("<BBHIIHH")
_SIZE = struct.Struct("<I")
assert _DESCENT_FIXED.size == 16


@dataclass(frozen=True, slots=True, eq=False)
class Descent:
    """What an engine says of one block. Raises InvalidRequest for values out of range, or if it is too long."""

    tokens: Tokens
    """The token ids of this block alone, at least one."""
    depth: int
    """The index of the block in its prompt."""
    parent: bytes = b""
    """The key of the block before it; empty for the first block of a prompt."""
    hash_bytes: int = 32
    """Leading bytes of the block's key that are the engine's own hash."""
    group: int = 0
    """The engine's number of this kind of KV."""
    extra: bytes = b""
    """What the engine's hash covers in addition to tokens, as a JSON object; empty for nothing."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if not isinstance(value := getattr(self, name), int | np.integer):
                raise InvalidRequest(f"a descent has {name}={brief(value)}: expected a whole number")
        for name in _BYTES:
            if not isinstance(value := getattr(self, name), bytes):
                raise InvalidRequest(f"a descent has {name}={brief(value)}: expected bytes")
        if self.parent and not BLOCK_KEY_BYTES_MIN <= len(self.parent) <= BLOCK_KEY_BYTES_MAX:
            raise InvalidRequest(f"a descent's parent has {len(self.parent)} bytes: expected the key of a block")
        if not len(token_array(self.tokens)) or bool(self.parent) != bool(self.depth) or not 0 <= self.depth < 1 << 32:
            raise InvalidRequest("a descent needs tokens, and a parent unless it is the first of its prompt (depth 0)")
        if not HASH_BYTES_MIN <= self.hash_bytes <= BLOCK_KEY_BYTES_MAX or not 0 <= self.group < 256:
            raise InvalidRequest(
                f"a descent has hash_bytes={brief(self.hash_bytes)} and group={brief(self.group)}: out of range"
            )
        if len(self.extra) > EXTRA_BYTES_MAX or self.packed_bytes > DESCENT_BYTES_MAX:
            raise InvalidRequest(
                f"a descent has {self.packed_bytes} bytes, {len(self.extra)} of them extra: expected at most "
                f"{DESCENT_BYTES_MAX} and {EXTRA_BYTES_MAX}; leave it out"
            )

    @property
    def packed_bytes(self) -> int:
        return _DESCENT_FIXED.size + len(self.parent) + 4 * len(self.tokens) + len(self.extra)

    def pack(self) -> bytes:
        counts = (len(self.tokens), len(self.parent), len(self.extra))
        fixed = _DESCENT_FIXED.pack(self.hash_bytes, self.group, 0, self.depth, *counts)
        return b"".join((fixed, self.parent, token_array(self.tokens).tobytes(), self.extra))

    @classmethod
    def unpack(cls, packed: bytes) -> Descent | None:
        """Returns what bytes say; None if they are not a descent."""
        if not _DESCENT_FIXED.size < len(packed) <= DESCENT_BYTES_MAX:
            return None
        hash_bytes, group, zero, depth, token_count, parent_bytes, extra_bytes = _DESCENT_FIXED.unpack_from(packed)
        tokens_at = _DESCENT_FIXED.size + parent_bytes
        extra_at = tokens_at + 4 * token_count
        if zero or extra_at + extra_bytes != len(packed):
            return None
        tokens: Tokens = np.frombuffer(packed, "<u4", token_count, tokens_at) if token_count else ()
        parent, extra = packed[_DESCENT_FIXED.size : tokens_at], packed[extra_at:]
        try:
            return cls(tokens, depth, parent, hash_bytes, group, extra)
        except InvalidRequest:
            return None


@dataclass(frozen=True, slots=True)
class Ancestry:
    """Where blocks of one put are in their prompt."""

    first: int = 0
    """The index of the first of them among the blocks of the prompt."""
    descents: Sequence[bytes] = ()
    """The packed descent of each, b"" for none; empty if none has one."""


def write_descent(header: bytearray, at: int, descent: bytes) -> None:
    """Writes a descent behind the tables of a header, which is zero from ``at`` on."""
    assert len(descent) <= DESCENT_BYTES_MAX and at + _SIZE.size + len(descent) <= len(header) - 8
    if descent:
        _SIZE.pack_into(header, at, len(descent))
        header[at + _SIZE.size : at + _SIZE.size + len(descent)] = descent


def read_descent(header: ReadBuffer, at: int, size: int) -> bytes:
    """Returns the descent in a verified header of ``size`` bytes; b"" for none, and for a size that cannot be."""
    if at + _SIZE.size > size - 8:
        return b""
    length = _SIZE.unpack_from(header, at)[0]
    if not 0 < length <= min(DESCENT_BYTES_MAX, size - 8 - at - _SIZE.size):
        return b""
    return bytes(memoryview(header)[at + _SIZE.size : at + _SIZE.size + length])


def laid_descent(descent: bytes) -> bytes:
    """Returns a descent as it lies in a header, its size in front, for native code."""
    return _SIZE.pack(len(descent)) + descent


Incarnation = NewType("Incarnation", bytes)

MAGIC = b"\x93KVCHNK\n"
VERSION = 1
BLAKE2B_128 = 1
PAGE_BYTES = 4096

_FIXED = struct.Struct("<8sHBBBBBxIIIIQ16s16s32s16s8s")
_SUM = struct.Struct("<Q")
assert _FIXED.size == 128
FIXED_BYTES = _FIXED.size
INCARNATION_AT = 104


class Encoding(enum.IntFlag):
    """The encodings of the sections of a chunk file; all but PLAIN have version 2."""

    PLAIN = 0
    COMPRESSED = 1
    """Byte planes apart, then zstd, section by section."""
    ENCRYPTED = 2
    """AES-256-GCM of each section and of the identity."""


class IdentityKind(enum.IntEnum):
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

    kind: IdentityKind
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
        return self.section_count * self.section_bytes

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A section as it lies in an encoded file."""

    checksum: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header: the file's own description of itself."""

    kind: IdentityKind
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
    """What the writer of a block says of its descent: a claim. Empty for none, and if encrypted."""

    @property
    def file_bytes(self) -> int:
        """Bytes that the whole file must have."""
        if self.encoding:
            return self.header_bytes + sum(each.size_bytes for each in self.stored)
        return self.header_bytes + len(self.checksums) * self.section_bytes


def expected_block(namespace: Namespace, key: bytes, size_bytes: int, descent: bytes = b"") -> Expected:
    """Returns what the file of an engine-hashed block of ``size_bytes`` must hold; a writer adds its ``descent``."""
    return Expected(
        IdentityKind.BLOCK,
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
    kind: IdentityKind,
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
    numbers = (VERSION, XXH3_64, BLAKE2B_128, kind, 0, 0, size, depth, identity_bytes, section_count, section_bytes)
    _FIXED.pack_into(header, 0, MAGIC, *numbers, names[:16], names[16:32], names[32:64], names[64:], b"")
    header[FIXED_BYTES : FIXED_BYTES + len(inner)] = inner
    if descent:
        write_descent(header, FIXED_BYTES + len(inner), descent)
    _SUM.pack_into(header, size - _SUM.size, checksum(memoryview(header)[: -_SUM.size]))
    return header


def _fields(header: ReadBuffer, version: int) -> tuple[Any, ...]:
    """Returns the fixed fields of a header of this version, from its kind on. Raises Damaged."""
    if len(header) < PAGE_BYTES:
        raise Damaged(Damage.SIZE)
    magic, found, *algorithms, kind = (fields := _FIXED.unpack_from(header))[:5]
    if magic != MAGIC:
        raise Damaged(Damage.MAGIC)
    if found != version:
        raise Damaged(Damage.VERSION)
    if algorithms != [XXH3_64, BLAKE2B_128] or kind not in (IdentityKind.TOKENS, IdentityKind.BLOCK):
        raise Damaged(Damage.ALGORITHM)
    return fields[4:]


def _check_size(header: ReadBuffer, size: int, *possible: int) -> None:
    """Raises Damaged for a wrong size or checksum; before it is used, so that a damaged size reads no other memory."""
    if size not in possible or size > len(header):
        raise Damaged(Damage.GEOMETRY)
    if _SUM.unpack_from(header, size - _SUM.size)[0] != checksum(memoryview(header)[: size - _SUM.size]):
        raise Damaged(Damage.HEADER_CHECKSUM)


def decode(header: ReadBuffer) -> Header:
    """Decodes the fields of a header. ``header`` holds at least the whole header; the rest is ignored.

    Raises Damaged if it is not a header of this version, or its checksum does not match.
    """
    kind, _, _, size, depth, identity_bytes, section_count, section_bytes, *names = _fields(header, VERSION)
    address, parent, namespace, incarnation, _ = names
    _check_size(header, size, header_bytes(identity_bytes, section_count))
    view = memoryview(header)
    table = _FIXED.size + _padded(identity_bytes)
    behind = table + _SUM.size * section_count
    has_descent = kind == IdentityKind.BLOCK and any(view[behind : behind + 2])
    return Header(
        IdentityKind(kind),
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

    Not verified. It distinguishes files under one name, intact or corrupt: two publications never share it.
    """
    return Incarnation(bytes(memoryview(prefix)[INCARNATION_AT : INCARNATION_AT + ADDRESS_BYTES]))


def is_self_consistent(header: Header) -> bool:
    """True if address, namespace and identity of a header belong together, as far as the file alone can show.

    For ``fsck``: a header written by kvstore always satisfies it, whatever name the file has now. An encrypted header
    does not show it.
    """
    if Encoding.ENCRYPTED in header.encoding:
        return True
    if header.kind is IdentityKind.TOKENS:
        return chunk_address(header.namespace, header.parent, header.identity) == header.address
    return hashed_block_address(header.namespace, header.identity) == header.address


def _padded(count: int) -> int:
    """Returns ``count`` rounded up to 8, so that the section table is aligned."""
    return -(-count // 8) * 8


# Version 2 of the header, for chunk files whose sections are compressed, encrypted, or both.
#
# A file has version 2 only if compression or encryption was asked for, and it stands for a file of version 1. This
# module says which bytes lie where; ``kvstore/codec`` does the encoding. Pure.


VERSION_2 = 2
KEY_ID_BYTES = 8
SALT_BYTES = 16
TAG_BYTES = 16
ITEMSIZES = frozenset({1, 2, 4, 8})

_ENTRY_BYTES = 16


def _table_at(identity_bytes: int, section_count: int) -> int:
    """Returns where the table of stored sections begins: behind identity and checksums, tag and salt."""
    return FIXED_BYTES + inner_bytes(identity_bytes, section_count) + TAG_BYTES + SALT_BYTES


def is_encoded(prefix: ReadBuffer) -> bool:
    """True if a file that begins with ``prefix`` says that it has version 2."""
    return bytes(prefix[:10]) == MAGIC + VERSION_2.to_bytes(2, "little")


def is_encrypted(prefix: ReadBuffer) -> bool:
    """True if a file that begins with ``prefix``, of at least 128 bytes, says that it is encrypted."""
    return is_encoded(prefix) and bool(_FIXED.unpack_from(prefix)[5] & Encoding.ENCRYPTED)


def encoded_header_bytes(identity_bytes: int, section_count: int) -> int:
    """Returns the size of a header of version 2."""
    used = _table_at(identity_bytes, section_count) + _ENTRY_BYTES * section_count + _SUM.size
    return -(-used // PAGE_BYTES) * PAGE_BYTES


HEADER_BYTES_MAX = encoded_header_bytes(4 * CHUNK_TOKENS_MAX, 2 * LAYERS_MAX) + PAGE_BYTES


def encode_fixed(
    expected: Expected, incarnation: Incarnation, encoding: Encoding, key_id: bytes, payload_bytes: int
) -> bytes:
    """Returns the first 128 bytes of the header, to which encryption ties each section.

    ``key_id`` is empty if nothing is encrypted; ``payload_bytes`` is the sum of all sections as they are stored.
    """
    assert encoding and len(incarnation) == ADDRESS_BYTES
    assert len(key_id) == (KEY_ID_BYTES if Encoding.ENCRYPTED in encoding else 0)
    size = encoded_header_bytes(len(expected.identity), expected.section_count)
    if size + payload_bytes == expected.file_bytes:
        size += PAGE_BYTES  # so that the size alone distinguishes it from a file of version 1
    kinds = VERSION_2, XXH3_64, BLAKE2B_128, expected.kind, encoding, expected.itemsize
    sizes = size, expected.depth, len(expected.identity), expected.section_count, expected.section_bytes
    names = expected.address, expected.parent, expected.namespace, incarnation, key_id
    return _FIXED.pack(MAGIC, *kinds, *sizes, *names)


def encode_header(fixed: bytes, sealed: bytes, salt: bytes, stored: list[Stored], descent: bytes = b"") -> bytearray:
    """Returns the whole header: ``sealed`` is the identity and the sections' checksums, encrypted (with the tag) or
    not.

    ``salt`` is empty if nothing is encrypted; only then a block may have a ``descent``, which has tokens in it.
    """
    fields = _FIXED.unpack(fixed)
    size, identity_bytes, section_count = fields[7], fields[9], fields[10]
    table = _table_at(identity_bytes, section_count)
    assert len(stored) == section_count and len(sealed) <= table - SALT_BYTES - FIXED_BYTES
    assert not (salt and descent)
    header = bytearray(size)
    header[:FIXED_BYTES] = fixed
    header[FIXED_BYTES : FIXED_BYTES + len(sealed)] = sealed
    header[table - SALT_BYTES : table - SALT_BYTES + len(salt)] = salt
    entries = [number for each in stored for number in (each.checksum, each.size_bytes)]
    struct.pack_into(f"<{2 * section_count}Q", header, table, *entries)
    write_descent(header, table + _ENTRY_BYTES * section_count, descent)
    _SUM.pack_into(header, size - _SUM.size, checksum(memoryview(header)[: -_SUM.size]))
    return header


def decode_any(header: ReadBuffer) -> Header:
    """Decodes the fields of a header of either version; ignores bytes after the header. Raises Damaged."""
    return decode_encoded(header) if is_encoded(header) else decode(header)


def decode_encoded(header: ReadBuffer) -> Header:
    """Decodes the fields of a header of version 2, without any key. Raises Damaged."""
    kind, encoding_number, itemsize, size, depth, identity_bytes, section_count, section_bytes, *names = _fields(
        header, VERSION_2
    )
    address, parent, namespace, incarnation, key_id = names
    if not 1 <= encoding_number <= (Encoding.COMPRESSED | Encoding.ENCRYPTED):
        raise Damaged(Damage.ALGORITHM)
    if itemsize not in ITEMSIZES:
        raise Damaged(Damage.GEOMETRY)
    least = encoded_header_bytes(identity_bytes, section_count)
    _check_size(header, size, least, least + PAGE_BYTES)
    view, encoding = memoryview(header), Encoding(encoding_number)
    table = _table_at(identity_bytes, section_count)
    entries = struct.unpack_from(f"<{2 * section_count}Q", header, table)
    is_encrypted = Encoding.ENCRYPTED in encoding
    longest = section_bytes + (TAG_BYTES if is_encrypted else 0)
    shortest = longest - section_bytes if Encoding.COMPRESSED in encoding else longest
    if not all(shortest <= each <= longest for each in entries[1::2]):
        raise Damaged(Damage.GEOMETRY)
    inner = view[FIXED_BYTES : FIXED_BYTES + inner_bytes(identity_bytes, section_count)]
    return Header(
        IdentityKind(kind),
        Address(address),
        Address(parent),
        NamespaceDigest(namespace),
        Incarnation(incarnation),
        depth,
        b"" if is_encrypted else bytes(inner[:identity_bytes]),
        section_bytes,
        () if is_encrypted else struct.unpack_from(f"<{section_count}Q", inner, len(inner) - 8 * section_count),
        size,
        encoding,
        itemsize,
        key_id if is_encrypted else b"",
        tuple(Stored(*entry) for entry in zip(entries[::2], entries[1::2], strict=True)),
        _descent_of(header),
    )


def _descent_of(header: ReadBuffer) -> bytes:
    """Returns the descent in a verified header; empty for a chunk of tokens, and if the header is encrypted."""
    fields = _FIXED.unpack_from(header)
    if fields[4] != IdentityKind.BLOCK or Encoding.ENCRYPTED in Encoding(fields[5]):
        return b""
    return read_descent(header, _table_at(fields[9], fields[10]) + _ENTRY_BYTES * fields[10], fields[7])


def sealed_of(header: ReadBuffer) -> tuple[memoryview, bytes]:
    """Returns the sealed part of a decoded whole header, its tag included, and the salt."""
    fields = _FIXED.unpack_from(header)
    table = _table_at(fields[9], fields[10])
    view = memoryview(header)
    return view[FIXED_BYTES : table - SALT_BYTES], bytes(view[table - SALT_BYTES : table])


def inner_of(header: ReadBuffer) -> memoryview:
    """Returns identity and checksums of a whole, unencrypted header, as they lie in version 1 too."""
    fields = _FIXED.unpack_from(header)
    return memoryview(header)[FIXED_BYTES : FIXED_BYTES + inner_bytes(fields[9], fields[10])]


def plain_header(header: ReadBuffer, inner: ReadBuffer) -> bytearray:
    """Returns the header of version 1 that a header stands for; ``inner`` is its identity and checksums, decrypted."""
    fields = _FIXED.unpack_from(header)
    (depth, identity_bytes, section_count, section_bytes), names = fields[8:12], b"".join(fields[12:16])
    numbers = identity_bytes, section_count, section_bytes
    return encode_parts(IdentityKind(fields[4]), depth, *numbers, names, inner, _descent_of(header))


# Generations: which life of the metadata a root belongs to. Each lasts as long as its etcd; its loss begins the next.
#
# Both sides keep one record of it: the root as ``generations/<number>``, etcd under the key ``generation``. If they
# differ, etcd was wiped, or is another cluster's (rule C6).


CLUSTER_BYTES = 16
RECORD_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Generation:
    """``number`` counts from 1; ``cluster`` is 16 random bytes, which tell two lives of one number apart."""

    number: int
    cluster: bytes

    def to_json(self) -> bytes:
        return json.dumps({"generation": self.number, "cluster": self.cluster.hex()}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, content: bytes, where: str) -> Generation:
        """Parses what ``to_json`` returned; ignores fields of newer versions. Raises RootMismatch, naming ``where``."""
        try:
            fields = parse_json(content)
            found = cls(fields["generation"], bytes.fromhex(fields["cluster"]))
        except (ValueError, KeyError, TypeError) as cause:
            raise RootMismatch(f"{where} is not the record of a generation: {cause}") from cause
        if type(found.number) is not int or found.number < 1 or len(found.cluster) != CLUSTER_BYTES:
            raise RootMismatch(
                f"{where} is not the record of a generation: expected a number from 1 on and {CLUSTER_BYTES} bytes"
            )
        return found

    def __str__(self) -> str:
        return f"{self.number} ({self.cluster.hex()[:8]})"
