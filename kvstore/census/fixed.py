"""The first bytes of a chunk file, read leniently: for counting and telling apart, never for serving.

A header is verified as a whole. Here 128 bytes are enough, whatever the version and encoding, and without keys.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvstore.address import Address
from kvstore.buffers import ReadBuffer
from kvstore.format.header import FIXED_BYTES, MAGIC, Incarnation, Kind
from kvstore.namespace import NamespaceDigest

_FIELDS = struct.Struct("<8sH2xBB6xI16x16s16s32s16s8s")
assert _FIELDS.size == FIXED_BYTES


class Fixed(NamedTuple):
    """The fixed part of a header; unverified. One is made for each file that a walk looks at."""

    version: int
    kind: Kind
    depth: int
    address: Address
    parent: Address
    """Zero for the first chunk of a prompt and for a block."""
    namespace: NamespaceDigest
    incarnation: Incarnation
    encoding: int
    """Bits of the encoding byte: 0 as version 1 writes it, 1 compressed, 2 encrypted."""
    key_id: bytes
    """8 bytes; zero where nothing is encrypted."""


def read_fixed(prefix: ReadBuffer) -> Fixed | None:
    """Reads the fields of a file that begins with ``prefix``; None if it is not a chunk file."""
    if len(prefix) < FIXED_BYTES:
        return None
    magic, version, kind, encoding, depth, address, parent, namespace, incarnation, key_id = _FIELDS.unpack_from(prefix)
    if magic != MAGIC or kind not in (Kind.TOKENS, Kind.BLOCK):
        return None
    return Fixed(
        version,
        Kind(kind),
        depth,
        Address(address),
        Address(parent),
        NamespaceDigest(namespace),
        Incarnation(incarnation),
        encoding,
        key_id,
    )
