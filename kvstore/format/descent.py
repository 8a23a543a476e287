"""The descent of an engine-hashed block: what its writer says of the tokens, the block before it and the engine's hash.

It lies in the padding of a block's header (FORMAT.md, 4.7). Separate from the header's fields because it proves
nothing and no reader of a block looks at it: it is for publishers of events alone. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.address import BLOCK_KEY_BYTES_MAX, BLOCK_KEY_BYTES_MIN
from kvstore.brief import brief
from kvstore.buffers import ReadBuffer
from kvstore.errors import InvalidRequest
from kvstore.tokens import Tokens, token_array

DESCENT_BYTES_MAX = 3_584
"""Limit of one descent as bytes: it fits behind the longest key in a header of 4096 bytes of either version."""
EXTRA_BYTES_MAX = 1_024
HASH_BYTES_MIN = 8
PARTS_MAX = 4_096
WHOLE_BYTES = 16
NO_WHOLE = bytes(WHOLE_BYTES)

_NUMBERS = ("depth", "hash_bytes", "group", "parts")
_BYTES = ("parent", "whole", "extra")
_FIXED = struct.Struct("<BBHI16sIHH")
_SIZE = struct.Struct("<I")
assert _FIXED.size == 32


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
    parts: int = 1
    """Number of namespaces that each have a part of the block under the same key: only all parts are of use."""
    whole: bytes = NO_WHOLE
    """16 bytes that these namespaces share and no others; zero for one part."""
    extra: bytes = b""
    """What the engine's hash covers beside tokens, as a JSON object; empty for nothing."""

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
        if not 1 <= self.parts <= PARTS_MAX or len(self.whole) != WHOLE_BYTES:
            raise InvalidRequest(
                f"a descent has parts={brief(self.parts)}: expected 1 to {PARTS_MAX}, and 16 bytes as whole"
            )
        if len(self.extra) > EXTRA_BYTES_MAX or self.packed_bytes > DESCENT_BYTES_MAX:
            raise InvalidRequest(
                f"a descent has {self.packed_bytes} bytes, {len(self.extra)} of them extra: expected at most "
                f"{DESCENT_BYTES_MAX} and {EXTRA_BYTES_MAX}; leave it out"
            )

    @property
    def packed_bytes(self) -> int:
        """The size of its bytes."""
        return _FIXED.size + len(self.parent) + 4 * len(self.tokens) + len(self.extra)

    def pack(self) -> bytes:
        """Returns its bytes."""
        counts = (len(self.tokens), len(self.parent), len(self.extra))
        fixed = _FIXED.pack(self.hash_bytes, self.group, self.parts, self.depth, self.whole, *counts)
        return b"".join((fixed, self.parent, token_array(self.tokens).tobytes(), self.extra))

    @classmethod
    def unpack(cls, packed: bytes) -> Descent | None:
        """Returns what bytes say; None if they are not a descent."""
        if not _FIXED.size < len(packed) <= DESCENT_BYTES_MAX:
            return None
        hash_bytes, group, parts, depth, whole, token_count, parent_bytes, extra_bytes = _FIXED.unpack_from(packed)
        tokens_at = _FIXED.size + parent_bytes
        extra_at = tokens_at + 4 * token_count
        if extra_at + extra_bytes != len(packed):
            return None
        tokens: Tokens = np.frombuffer(packed, "<u4", token_count, tokens_at) if token_count else ()
        parent, extra = packed[_FIXED.size : tokens_at], packed[extra_at:]
        try:
            return cls(tokens, depth, parent, hash_bytes, group, parts, whole, extra)
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
