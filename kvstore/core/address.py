"""Addresses: a chained, keyed hash of a chunk's tokens and of all before it.

``address(i) = blake2b(address(i-1) || tokens(i) as u32 little-endian, key=namespace digest, 16 bytes)`` with
``address(-1)`` = 16 zero bytes.  Keyed with the namespace, so that no prompt of one tenant can collide with
another's; input-addressed, so an address says nothing of the bytes (kernels differ in the last bit).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType

from kvstore.core.namespace import Namespace
from kvstore.core.text import kind_of
from kvstore.errors import InvalidRequest
from kvstore.native import library as native

Address = NewType("Address", bytes)

ADDRESS_BYTES = 16
NO_PARENT = Address(bytes(ADDRESS_BYTES))
SHORT_BYTES = 4096
"""Fewer bytes of tokens are hashed in less time than it takes to get the GIL back."""
BLOCK_KEY_BYTES_MIN = 16
BLOCK_KEY_BYTES_MAX = 64

_BLOCK_PERSON = b"kvstore.block.1"


def chained_addresses(
    namespace: Namespace,
    packed: bytes,
    first: int = 0,
    parent: Address = NO_PARENT,
    counts: Sequence[int] | None = None,
) -> bytes:
    """Returns the addresses of the full chunks of ``packed`` (tokens as u32) from chunk ``first`` on, whose parent is
    given, one after the other.

    With ``counts`` the tokens are those of several prompts, which have so many chunks each.
    """
    size = namespace.layout.chunk_tokens * 4
    if counts is None:
        counts = (max(0, len(packed) // size - first),)
    assert (first + sum(counts)) * size <= len(packed)
    found = ctypes.create_string_buffer(ADDRESS_BYTES * sum(counts))
    each, tokens = (ctypes.c_uint64 * len(counts))(*counts), packed[first * size :]
    library = native.brief if len(tokens) < SHORT_BYTES else native.library
    library.kv_addresses(namespace.digest, parent, tokens, size, each, len(counts), found)
    return found.raw


def chunk_address(digest: bytes, parent: Address, packed_tokens: bytes) -> Address:
    """The address of one chunk, given its parent's; checks a file that names both."""
    state = blake2b(parent, digest_size=ADDRESS_BYTES, key=digest, person=native.CHUNK_PERSON)
    state.update(packed_tokens)
    return Address(state.digest())


def hashed_block_address(digest: bytes, key: bytes) -> Address:
    """The address of a block, given the engine's hash."""
    return Address(blake2b(key, digest_size=ADDRESS_BYTES, key=digest, person=_BLOCK_PERSON).digest())


def block_address(namespace: Namespace, key: bytes) -> Address:
    """The address of a block that an engine hashed itself; ``key`` is the engine's hash, 16 to 64 bytes.

    Raises InvalidRequest for a key of another type or size.
    """
    return block_addresses(namespace, (key,))[0]


def block_addresses(namespace: Namespace, keys: Iterable[bytes]) -> list[Address]:
    """``block_address`` of each key. Raises InvalidRequest for the first key of another type or size."""
    addresses: list[Address] = []
    # A copy of a state that has the namespace in it costs a third less than making one.
    keyed = blake2b(digest_size=ADDRESS_BYTES, key=namespace.digest, person=_BLOCK_PERSON).copy
    for key in keys:
        if not isinstance(key, bytes):
            raise InvalidRequest(f"block key is {kind_of(key)}: expected bytes")
        if not BLOCK_KEY_BYTES_MIN <= len(key) <= BLOCK_KEY_BYTES_MAX:
            raise InvalidRequest(
                f"block key has {len(key)} bytes: expected {BLOCK_KEY_BYTES_MIN} to {BLOCK_KEY_BYTES_MAX}"
            )
        state = keyed()
        state.update(key)
        addresses.append(Address(state.digest()))
    return addresses
