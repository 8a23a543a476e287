"""Addresses, by which chunks and blocks are found. ``format/keyset.py`` hashes whole prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from kvstore.core.namespace import Namespace
from kvstore.core.validate import kind_of
from kvstore.errors import InvalidRequest
from kvstore.native import library as native

TokenArray = npt.NDArray[np.uint32]
Tokens = Sequence[int] | npt.NDArray[Any]

TOKENS_MAX = 4_194_304
TOKEN_ID_MAX = (1 << 32) - 1

Address = NewType("Address", bytes)

ADDRESS_BYTES = 16
NO_PARENT = Address(bytes(ADDRESS_BYTES))
BLOCK_KEY_BYTES_MIN = 16
BLOCK_KEY_BYTES_MAX = 64

_BLOCK_PERSON = b"kvstore.block.1"


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
