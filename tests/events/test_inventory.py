"""The inventory against a plain model: sets of chunks, and prefixes counted by hand."""

from __future__ import annotations

import random
from hashlib import blake2b

from kvstore.core.address import ADDRESS_BYTES, NO_PARENT, Address
from kvstore.events.inventory import EventBlock, NamespaceIndex
from kvstore.format import places
from tests.kit.cases import for_each

BITS = 2
Chunk = tuple[int, int]
"""The number of a chain, and the depth."""


def address(chunk: Chunk) -> Address:
    return Address(blake2b(b"%d %d" % chunk, digest_size=ADDRESS_BYTES).digest())


def block(chunk: Chunk) -> EventBlock:
    chain, depth = chunk
    parent = address((chain, depth - 1)) if depth else NO_PARENT
    return EventBlock(address(chunk), parent, depth, bytes(4), chain * 100 + depth, chain * 100 + depth - 1)


def chunk_of(told: EventBlock) -> Chunk:
    return divmod(told.hash, 100)


def of_shard(shard: int, chunks: list[Chunk]) -> list[Chunk]:
    return [each for each in chunks if places.shard(address(each), BITS) == shard]


class Model:
    """What must be told: chunks that are there, not condemned, and all before them as well."""

    def __init__(self) -> None:
        self.there: set[Chunk] = set()
        self.condemned: set[Chunk] = set()

    def told(self) -> set[Chunk]:
        good = self.there - self.condemned
        return {(chain, depth) for chain, depth in good if all((chain, above) in good for above in range(depth))}


def check_replay(heard: set[Chunk], inventory: NamespaceIndex) -> None:
    """Applies the difference to what a subscriber has; each event must change something, parents come first."""
    found = inventory.settle()
    for each in found.removed:
        heard.remove(chunk_of(each))
    for each in found.stored:
        chain, depth = chunk_of(each)
        assert (chain, depth) not in heard
        assert depth == 0 or (chain, depth - 1) in heard, "a parent is told before its child"
        heard.add((chain, depth))


@for_each("seed", range(5))
def test_the_differences_add_up_to_what_match_would_find(seed: int) -> None:
    chance = random.Random(seed)
    inventory, model, heard = NamespaceIndex(bytes(32), BITS), Model(), set[Chunk]()
    everything = [(chain, depth) for chain in range(6) for depth in range(12)]
    for _ in range(120):
        some = [each for each in everything if chance.random() < 0.3]
        act = chance.randrange(3)
        if act == 0:
            chosen = {address(each): each for each in some[:3] if each in model.there}
            inventory.condemn(entry for entry in inventory.present() if entry.address in chosen)
            model.condemned |= {*chosen.values()}
        else:
            shard = chance.randrange(1 << BITS)
            inventory.listed(shard, map(address, of_shard(shard, some)))
            listed = set(of_shard(shard, everything))
            model.there = (model.there - listed) | set(of_shard(shard, some))
            model.condemned -= listed
        by_address = {address(each): each for each in everything}
        for entry in inventory.unknown():
            inventory.learn(entry, block(by_address[entry.address]))
        check_replay(heard, inventory)
        assert heard == model.told()
        assert {chunk_of(each) for each in inventory.snapshot()} == heard
        assert all(inventory.has_path(address(each)) == (each in heard) for each in everything)
        assert all(inventory.has_hash(block(each).hash) == (each in heard) for each in everything)
    for shard in range(1 << BITS):
        inventory.listed(shard, ())
    inventory.settle()
    assert not any(inventory._shards.values()), "nothing is kept of what is gone"
