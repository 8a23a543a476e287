"""Roots with chunks in them, and the ways in which a file can go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.core.address import Address
from kvstore.core.buffers import token_array
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.format import places
from kvstore.format.header import Expected, expected_block
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.root.identity import NamespaceRecords, RootIdentity, create_or_open
from kvstore.root.interface import Root
from kvstore.testing.roots import content_of, publish
from tests.kit.images import encoded

NOW_S = 1_700_000_000.0
SHARD_BITS = 4
LAYOUT = Layout(layers=2, kv_heads=1, head_dim=4, dtype="float16", chunk_tokens=4)

read = content_of


@dataclass(frozen=True)
class Filled:
    """A root with one chain of chunks, and a block."""

    root: Root
    identity: RootIdentity
    namespace: Namespace
    chain: ChunkKeys

    def expected(self, index: int) -> Expected:
        return self.chain.expected(index)

    def name(self, index: int) -> Name:
        return self.name_of(self.chain.addresses[index])

    def name_of(self, address: Address) -> Name:
        return places.chunk(address, NamespaceId(self.namespace.digest[:8]), SHARD_BITS)

    def content(self, index: int) -> bytes:
        return chunk_bytes(self.expected(index))


def chunk_bytes(expected: Expected) -> bytes:
    payload = np.random.default_rng(expected.depth).bytes(expected.payload_bytes)
    return encoded(expected, payload, RandomIds().fresh())


def write(root: Root, name: Name, content: bytes, *, age_s: float = 0.0) -> None:
    """Puts a file at any name and replaces what is there: a way to cause damage."""
    root.remove(name)
    assert publish(root, name, content, stamp_ns=int((NOW_S - age_s) * 1e9))


def fill(root: Root, chunks_count: int = 6, name: str = "model") -> Filled:
    """Makes a root with a chain of chunks, one block, and the namespace's records."""
    identity = create_or_open(root, RandomIds(), shard_bits=SHARD_BITS)
    namespace = Namespace.of(name, LAYOUT)
    NamespaceRecords(root, RandomIds(), SystemClock()).claim(namespace)
    filled = Filled(root, identity, namespace, ChunkKeys.of(namespace, token_array(range(4 * chunks_count))))
    for index in range(chunks_count):
        write(root, filled.name(index), filled.content(index))
    block = expected_block(namespace, b"k" * 16, 500)
    write(root, filled.name_of(block.address), chunk_bytes(block))
    return filled


DAMAGES = ("flipped", "header", "truncated", "removed", "another")


def spoil(file: Path, how: str, other: Path) -> None:
    """Does one of DAMAGES to a chunk file of more than 50,000 bytes; ``other`` is another chunk's."""
    content = bytearray(file.read_bytes())
    if how == "removed":
        file.unlink()
        return
    if how == "flipped":
        content[4096 + 50_000] ^= 1
    elif how == "header":
        content[50] ^= 1
    elif how == "truncated":
        del content[-5000:]
    elif how == "another":
        content[:] = other.read_bytes()
    file.write_bytes(content)
