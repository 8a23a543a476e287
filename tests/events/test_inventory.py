"""The index of a namespace against a plain model: sets of chunks, and prefixes counted by hand."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from kvstore.core.address import NO_PARENT, Address
from kvstore.events.inventory import BlockIdentity, NamespaceIndex
from kvstore.format import places
from tests.kit.cases import for_each
from tests.kit.clusters import SPACE

SHARD_BITS = 2
Chunk = tuple[int, int]
"""A chain, and the place of the chunk in it."""


def address(chunk: Chunk) -> Address:
    return Address(blake2b(repr(chunk).encode(), digest_size=16).digest())


def shard(chunk: Chunk) -> int:
    return places.shard(address(chunk), SHARD_BITS)


class Subscriber:
    """An index, with what a subscriber to its differences has."""

    def __init__(self) -> None:
        self.index = NamespaceIndex(SPACE, SHARD_BITS)
        self.has: set[Chunk] = set()
        self._chunks: dict[Address, Chunk] = {}

    def arrive(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._chunks[address(chunk)] = chunk
            self.index.arrived(address(chunk))

    def leave(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.index.left(address(chunk))

    def list(self, number: int, chunks: Iterable[Chunk]) -> None:
        """Lists a shard."""
        found = [chunk for chunk in chunks if shard(chunk) == number]
        self._chunks |= {address(chunk): chunk for chunk in found}
        self.index.listed(number, {address(chunk) for chunk in found})

    def settle(self) -> set[Chunk]:
        """Learns what arrived and applies the difference; each event must change something, parents come first."""
        for block in self.index.unread(1 << 30):
            chain, depth = self._chunks[block.address]
            above = address((chain, depth - 1)) if depth else NO_PARENT
            self.index.learn(block, BlockIdentity(above, bytes(4 * SPACE.layout.chunk_tokens)))
        found = self.index.settle()
        for block in found.removed:
            self.has.remove(self._chunks[block.address])
        for block in found.stored:
            chain, depth = self._chunks[block.address]
            assert (chain, depth) not in self.has
            assert depth == 0 or (chain, depth - 1) in self.has, "a parent is stored before its child"
            self.has.add((chain, depth))
        assert {self._chunks[block.address] for block in self.index.snapshot()} == self.has
        return self.has


def readable(chunks: set[Chunk]) -> set[Chunk]:
    """Those of some chunks whose parents are all among them."""
    return {(chain, depth) for chain, depth in chunks if all((chain, above) in chunks for above in range(depth))}


@for_each("seed", range(5))
def test_differences_add_up_to_readable_chunks(seed: int) -> None:
    random = np.random.default_rng(seed)
    subscriber, present, condemned = Subscriber(), set[Chunk](), set[Chunk]()
    everything = [(chain, depth) for chain in range(6) for depth in range(12)]
    for _ in range(60):
        some = [each for each in everything if random.random() < 0.15]
        act = random.integers(4)
        if act == 0:
            subscriber.arrive(some)
            present |= set(some)
        elif act == 1:
            subscriber.leave(some)
            present -= set(some)
        elif act == 2:
            blocks = {each: subscriber.index.find(address(each)) for each in some}
            known = {each: block for each, block in blocks.items() if block is not None}
            subscriber.index.condemn(known.values())
            condemned |= known.keys()
        else:
            listed = {each for each in everything if shard(each) == seed % 4}
            subscriber.list(seed % 4, some)
            present = (present - listed) | (set(some) & listed)
            condemned -= listed
        assert subscriber.settle() == readable(present - condemned)


def test_compaction_drops_gone_chunks_and_keeps_published_ones() -> None:
    subscriber, count = Subscriber(), 640
    chunks = [(chain, depth) for chain in range(count // 4) for depth in range(4)]
    subscriber.arrive(chunks)
    subscriber.settle()
    holes = {(chain, 1) for chain in range(0, count // 4, 16)}
    gone = {each for each in chunks if each[0] % 8} | holes
    subscriber.leave(gone)
    before = set(subscriber.settle())
    subscriber.index.compact(dead_min=64)
    assert len(list(subscriber.index.blocks())) == len(chunks) - len(gone - holes), "parents stay"
    assert subscriber.settle() == before
    subscriber.arrive(holes)
    assert subscriber.settle() == before | {(chain, depth) for chain, _ in holes for depth in (1, 2, 3)}
    subscriber.leave([(0, 1)])
    assert (0, 0) in subscriber.settle() and (0, 3) not in subscriber.has
