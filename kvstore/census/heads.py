"""The beginnings of a namespace's prompts, from the headers of its files: their first tokens, and their lengths."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from kvstore.address import Address
from kvstore.census.walk import walk
from kvstore.errors import KVStoreError
from kvstore.format.header import Damaged, Header, decode, header_bytes
from kvstore.namespace import Namespace
from kvstore.root.interface import Root
from kvstore.tokens import TokenArray

CHUNKS_MAX = 262_144
"""Limit on the files whose headers are read, and on their addresses in memory: about 100 MB."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a stored prompt: the tokens of its first chunk, and the chunks of its longest continuation."""

    tokens: TokenArray
    chunks: int


def list_heads(root: Root, shard_bits: int, namespace: Namespace, seconds_max: float) -> list[Head]:
    """Lists the prompts of a namespace, as far as the time allows. A chunk with a damaged or encrypted header is left
    out.
    """
    ends_s = time.monotonic() + seconds_max
    found = islice(_headers(root, shard_bits, namespace), CHUNKS_MAX)
    chunks = sorted(takewhile(lambda _: time.monotonic() < ends_s, found), key=lambda each: each.depth)
    first: dict[Address, Address] = {}
    lengths: dict[Address, int] = {}
    for chunk in chunks:
        begin = chunk.address if not chunk.depth else first.get(chunk.parent)
        if begin is not None:
            first[chunk.address] = begin
            lengths[begin] = chunk.depth + 1
    return [Head(np.frombuffer(each.identity, "<u4"), lengths[each.address]) for each in chunks if not each.depth]


def _headers(root: Root, shard_bits: int, namespace: Namespace) -> Iterator[Header]:
    size = header_bytes(namespace.layout.chunk_tokens * 4, namespace.layout.section_count)
    for found in walk(root, shard_bits):
        if found.namespace != namespace.id:
            continue
        with suppress(KVStoreError, Damaged):
            seen = root.look(found.name, size)
            header = decode(seen.prefix) if seen is not None else None
            if header is not None and header.namespace == namespace.digest:
                yield header
