"""Puts through a port whose refusal is a result, unless the caller requires them."""

from __future__ import annotations

from typing import TypeVar

from kvstore.buffers import Pieces, Sections
from kvstore.checks import checked_flag
from kvstore.client.port import Port
from kvstore.errors import Overloaded, StoreFull
from kvstore.format.header import Ancestry
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.results import PutResult, StoredBlocks
from kvstore.tokens import TokenArray
from kvstore.writes import WriteMode

R = TypeVar("R", PutResult, StoredBlocks)


def put_prompt(
    port: Port,
    namespace: Namespace,
    tokens: TokenArray,
    first: int,
    sections: Sections,
    hints: Hints,
    write: WriteMode | None,
    *,
    required: bool,
) -> PutResult:
    """Puts the chunks from ``first`` on. If the store refuses what it lacks, the result has what it had before."""
    required = checked_flag("required", required)
    try:
        return _checked(port.put(namespace, tokens, first, sections, hints, write), required)
    except Overloaded as error:
        size, present = namespace.layout.chunk_tokens, port.match(namespace, tokens, counts=False)
        if present == len(tokens) // size:
            return PutResult(present * size, 0, present - first, 0)
        if required:
            raise
        return PutResult(present * size, 0, 0, 0, error.reason)


def put_blocks(
    port: Port,
    namespace: Namespace,
    keys: list[bytes],
    buffers: Pieces,
    hints: Hints,
    write: WriteMode | None,
    ancestry: Ancestry | None = None,
    *,
    required: bool = False,
) -> StoredBlocks:
    """Puts blocks. If the store refuses what it lacks, the result has what it had before."""
    required = checked_flag("required", required)
    try:
        return _checked(port.put_blocks(namespace, keys, buffers, hints, write, ancestry), required)
    except Overloaded as error:
        present, fresh = port.present_blocks(namespace, keys), [False] * len(keys)
        if all(present):
            return StoredBlocks(present, fresh)
        if required:
            raise
        return StoredBlocks(present, fresh, error.reason)


def _checked(result: R, required: bool) -> R:
    """Returns the result. Raises Overloaded if a required put was stored in part."""
    if required and result.reason:
        kind = StoreFull if result.reason == StoreFull.reason else Overloaded
        raise kind("the store took only a part of this put, as memory had no room for the rest: put again later")
    return result
