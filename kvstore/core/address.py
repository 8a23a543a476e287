"""Tokens and addresses: token ids as packed u32, and the chained hash by which each chunk is found."""

from __future__ import annotations

import ctypes
from array import array as packed_array
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


def token_array(tokens: Tokens) -> TokenArray:
    """``tokens`` as an array of u32, copied only where its type or order demands it.

    Accepts any sequence of ints or a one-dimensional integer array; 0 <= id < 2**32, at most 4,194,304 of them.
    Raises InvalidRequest, naming the first offending position, otherwise.
    """
    try:
        count = len(tokens) if not isinstance(tokens, (bytes, bytearray, memoryview, str)) else -1
    except TypeError as cause:  # no sequence, or an array of no dimension
        raise _no_sequence(tokens) from cause
    if count < 0:
        raise _no_sequence(tokens)
    if count > TOKENS_MAX:
        raise InvalidRequest(f"{count} tokens are over the limit of {TOKENS_MAX}: split the prompt")
    if count == 0:
        return np.empty(0, dtype="<u4")
    if isinstance(tokens, (list, tuple)) and (packed := _packed_ints(tokens)) is not None:
        return packed
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as cause:
        raise _not_flat(tokens) from cause
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _no_integers(tokens, array)
    if array.dtype != np.dtype("<u4"):
        # One pass for both ends of the range: as unsigned, a negative id is larger than any that the type has room for.
        most = min(TOKEN_ID_MAX, int(np.iinfo(array.dtype).max))
        unsigned = array.view(array.dtype.str.replace("i", "u"))
        if int(unsigned.max()) > most:
            position = int(np.argmax(unsigned > most))
            raise InvalidRequest(
                f"token {int(array[position])} at position {position} is out of range: expected 0 to {TOKEN_ID_MAX}"
            )
    return np.ascontiguousarray(array, dtype="<u4")


def _packed_ints(tokens: list[int] | tuple[int, ...]) -> TokenArray | None:
    """A list of valid ids as an array, some times faster than numpy makes one; None where numpy has to judge."""
    if isinstance(tokens[0], bool | np.bool_):
        return None
    try:
        return np.frombuffer(packed_array("I", tokens), np.uintc).astype("<u4", copy=False)
    except (TypeError, OverflowError):
        return None


def _not_flat(tokens: Tokens) -> InvalidRequest:
    kinds = ((at, type(item).__name__) for at, item in enumerate(tokens) if not isinstance(item, int | np.integer))
    odd = next((f": item {at} is a {kind}" for at, kind in kinds), "")
    return InvalidRequest(f"tokens are not a flat sequence of ints{odd}")


def _no_integers(tokens: Tokens, array: npt.NDArray[Any]) -> InvalidRequest:
    if array.ndim == 0:  # a set, a mapping
        return _no_sequence(tokens)
    if array.ndim != 1:
        return InvalidRequest(f"tokens have shape {array.shape}: expected one dimension, the ids of one prompt")
    return InvalidRequest(f"tokens have type {_type_of(tokens, array)}: expected integers from 0 to {TOKEN_ID_MAX}")


def _no_sequence(tokens: object) -> InvalidRequest:
    return InvalidRequest(f"tokens are {kind_of(tokens)}: expected a sequence of ints or an integer array")


def _type_of(tokens: Tokens, array: npt.NDArray[Any]) -> str:
    """Returns the name of the type for a message: numpy's own, else that of the first item that is wrong."""
    if isinstance(tokens, np.ndarray) and array.dtype.kind != "O":
        return str(array.dtype)
    odd = [item for item in tokens if type(item) is bool or not _is_id(item)]
    return f"{type(odd[0]).__name__} (such as {odd[0]!r:.40})" if odd else "object"


def _is_id(item: object) -> bool:
    return isinstance(item, int | np.integer) and 0 <= int(item) <= TOKEN_ID_MAX


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
