"""Version 2 of the header, for chunk files whose sections are compressed, encrypted, or both.

Separate from version 1, which memory, native code and most files have. A file has version 2 only if compression or
encryption was asked for, and it stands for a file of version 1. This module says which bytes lie where;
``kvstore/encodings`` does the encoding. Pure.
"""

from __future__ import annotations

import struct

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.buffers import ReadBuffer
from kvstore.format.checksum import XXH3_64, checksum
from kvstore.format.descent import read_descent, write_descent
from kvstore.format.header import (
    BLAKE2B_128,
    FIXED_BYTES,
    MAGIC,
    PAGE_BYTES,
    Damage,
    Damaged,
    Encoding,
    Expected,
    Header,
    Incarnation,
    Kind,
    Stored,
    decode,
    encode_parts,
    inner_bytes,
)
from kvstore.layout import CHUNK_TOKENS_MAX, LAYERS_MAX
from kvstore.namespace import NamespaceDigest

__all__ = ["Encoding", "decode_any", "decode_encoded", "encode_fixed", "encode_header", "is_encoded", "plain_header"]

VERSION_2 = 2
KEY_ID_BYTES = 8
SALT_BYTES = 16
TAG_BYTES = 16
ITEMSIZES = frozenset({1, 2, 4, 8})

_FIXED = struct.Struct("<8sHBBBBBxIIIIQ16s16s32s16s8s")
_SUM = struct.Struct("<Q")
_ENTRY_BYTES = 16
assert _FIXED.size == FIXED_BYTES


def _table_at(identity_bytes: int, section_count: int) -> int:
    """Returns where the table of stored sections begins: behind identity and checksums, tag and salt."""
    return FIXED_BYTES + inner_bytes(identity_bytes, section_count) + TAG_BYTES + SALT_BYTES


def is_encoded(prefix: ReadBuffer) -> bool:
    """True if a file that begins with ``prefix`` says that it has version 2."""
    return bytes(prefix[:10]) == MAGIC + VERSION_2.to_bytes(2, "little")


def header_bytes(identity_bytes: int, section_count: int) -> int:
    """Returns the size of a header of version 2."""
    used = _table_at(identity_bytes, section_count) + _ENTRY_BYTES * section_count + _SUM.size
    return -(-used // PAGE_BYTES) * PAGE_BYTES


HEADER_BYTES_MAX = header_bytes(4 * CHUNK_TOKENS_MAX, 2 * LAYERS_MAX) + PAGE_BYTES


def encode_fixed(
    expected: Expected, incarnation: Incarnation, encoding: Encoding, key_id: bytes, payload_bytes: int
) -> bytes:
    """Returns the first 128 bytes of the header, to which encryption ties each section.

    ``key_id`` is empty if nothing is encrypted; ``payload_bytes`` is the sum of all sections as they are stored.
    """
    assert encoding and len(incarnation) == ADDRESS_BYTES
    assert len(key_id) == (KEY_ID_BYTES if Encoding.ENCRYPTED in encoding else 0)
    size = header_bytes(len(expected.identity), expected.section_count)
    if size + payload_bytes == expected.file_bytes:
        size += PAGE_BYTES  # so that the size alone tells it from a file of version 1
    return _FIXED.pack(
        MAGIC,
        VERSION_2,
        XXH3_64,
        BLAKE2B_128,
        expected.kind,
        encoding,
        expected.itemsize,
        size,
        expected.depth,
        len(expected.identity),
        expected.section_count,
        expected.section_bytes,
        expected.address,
        expected.parent,
        expected.namespace,
        incarnation,
        key_id,
    )


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
    if len(header) < PAGE_BYTES:
        raise Damaged(Damage.SIZE)
    fields = _FIXED.unpack_from(header)
    magic, version, *algorithms, kind, encoding_number, itemsize = fields[:7]
    size, depth, identity_bytes, section_count, section_bytes = fields[7:12]
    address, parent, namespace, incarnation, key_id = fields[12:]
    if magic != MAGIC:
        raise Damaged(Damage.MAGIC)
    if version != VERSION_2:
        raise Damaged(Damage.VERSION)
    known = algorithms == [XXH3_64, BLAKE2B_128] and kind in (Kind.TOKENS, Kind.BLOCK)
    if not known or not 1 <= encoding_number <= (Encoding.COMPRESSED | Encoding.ENCRYPTED):
        raise Damaged(Damage.ALGORITHM)
    # Check the size against the given bytes before anything is addressed through it.
    least = header_bytes(identity_bytes, section_count)
    if size not in (least, least + PAGE_BYTES) or size > len(header) or itemsize not in ITEMSIZES:
        raise Damaged(Damage.GEOMETRY)
    view, encoding = memoryview(header), Encoding(encoding_number)
    if _SUM.unpack_from(header, size - _SUM.size)[0] != checksum(view[: size - _SUM.size]):
        raise Damaged(Damage.HEADER_CHECKSUM)
    table = _table_at(identity_bytes, section_count)
    entries = struct.unpack_from(f"<{2 * section_count}Q", header, table)
    is_encrypted = Encoding.ENCRYPTED in encoding
    longest = section_bytes + (TAG_BYTES if is_encrypted else 0)
    shortest = longest - section_bytes if Encoding.COMPRESSED in encoding else longest
    if not all(shortest <= each <= longest for each in entries[1::2]):
        raise Damaged(Damage.GEOMETRY)
    inner = view[FIXED_BYTES : FIXED_BYTES + inner_bytes(identity_bytes, section_count)]
    return Header(
        Kind(kind),
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
    if fields[4] != Kind.BLOCK or Encoding.ENCRYPTED in Encoding(fields[5]):
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
    return encode_parts(Kind(fields[4]), depth, *numbers, names, inner, _descent_of(header))
