"""The inventory under random operations, against a model that is recounted from scratch (A1, E1, E2, E4)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvstore.core.address import Address, chunk_address
from kvstore.core.recency import Hints
from kvstore.tiers.arena import PAGE_BYTES, Extents
from kvstore.tiers.inventory import (
    EVICTED_TIMES_MAX,
    ChunkIdentity,
    TierEntry,
    TierInventory,
    TierSpace,
    print_of,
    shard_of,
)
from tests.kit.memory import NAMESPACES, Bytes, block, chain

STEPS = (
    *(["claim"] * 6 + ["finish"] * 5 + ["refer"] * 2 + ["unrefer"] * 3 + ["clean"] * 2),
    *("used", "retire", "victims", "drop"),
)


@dataclass
class Model:
    """An inventory under random operations, and everything that was ever claimed in it."""

    inventory: TierInventory
    room: TierSpace
    choose: random.Random
    unit_bytes: int
    places: list[ChunkIdentity]
    entries: list[TierEntry] = field(default_factory=list)
    references: dict[TierEntry, int] = field(default_factory=dict)
    claimed: set[TierEntry] = field(default_factory=set)
    dirty: set[TierEntry] = field(default_factory=set)
    """Claimed as dirty, and not cleaned since."""
    now_s: float = 0.0

    def there(self) -> dict[Address, TierEntry]:
        return {entry.address: entry for entry in self.entries if not entry.is_gone}

    def is_kept(self, entry: TierEntry) -> bool:
        """True if E2 keeps it."""
        return bool(self.references.get(entry) or entry in self.dirty or not entry.is_ready or entry in self.claimed)

    def evictable(self) -> set[TierEntry]:
        """Returns what may be evicted, in order: not kept entries, nor their ancestors."""
        there = self.there()
        kept = {entry.address for entry in there.values() if self.is_kept(entry)}
        for address in list(kept):
            while (above := there.get(there[address].parent)) is not None and above.address not in kept:
                address = above.address
                kept.add(address)
        return {entry for entry in there.values() if entry.address not in kept}

    def step(self) -> None:
        self.now_s += self.choose.random()
        rarely = self.choose.random() < 0.002
        getattr(self, "do_" + ("clear" if rarely else self.choose.choice(STEPS)))()

    def do_claim(self) -> None:
        place = self.choose.choice(self.places)
        size = self.choose.randint(1, 3) * self.unit_bytes
        there, evictable, free_bytes = self.there(), self.evictable(), self.room.free_bytes
        hints = Hints(self.choose.choice([0, 35, 70]), self.choose.choice([None, 300]))
        dirty, replica = self.choose.random() < 0.2, self.choose.random() < 0.2
        entry = self.inventory.claim(place, size, self.now_s, hints, dirty=dirty, replica=replica)
        gone = {entry for entry in there.values() if entry.is_gone}
        assert gone <= evictable, "E2: referenced, pinned or dirty, or the ancestor of such a one"
        for each in gone:
            children = [other for other in there.values() if other.parent == each.address]
            assert all(child.is_gone for child in children), "E1: children before parents"
        if place.address in there:
            assert entry is None and not gone, "E4"
        elif entry is None:
            # Where this claims a child of something, that and its ancestors stay.
            parent = there.get(place.parent)
            while parent is not None:
                evictable.discard(parent)
                parent = there.get(parent.parent)
            may_bytes = free_bytes + sum(each.size_bytes for each in evictable)
            if isinstance(self.room, Bytes):
                assert not gone and may_bytes < size, "room could have been made"
            else:
                limit = EVICTED_TIMES_MAX * size + 3 * self.unit_bytes
                assert sum(each.size_bytes for each in gone) <= limit
        else:
            assert entry.offset not in {each.offset for each in self.holding()}
            self.entries.append(entry)
            self.references[entry] = 1
            self.claimed.add(entry)
            self.dirty |= {entry} if dirty else set()
            if isinstance(self.room, Bytes) and gone:
                evicted_bytes = sum(each.size_bytes for each in gone)
                last_bytes = max(each.size_bytes for each in gone)
                assert free_bytes + evicted_bytes < size + last_bytes, "no more than is needed"

    def do_finish(self) -> None:
        if not self.claimed:
            return
        entry = self.choose.choice(sorted(self.claimed, key=lambda entry: entry.address))
        self.claimed.discard(entry)
        if self.choose.random() < 0.8:
            was_gone = entry.is_gone
            assert self.inventory.ready(entry) != was_gone
        else:
            self.inventory.drop(entry)
        self.unrefer(entry)

    def do_refer(self) -> None:
        entry = self.inventory.find(self.choose.choice(self.places).address)
        if entry is not None:
            self.inventory.refer(entry)
            self.references[entry] += 1

    def do_unrefer(self) -> None:
        held = [entry for entry, count in self.references.items() if count > (entry in self.claimed)]
        if held:
            self.unrefer(self.choose.choice(held))

    def unrefer(self, entry: TierEntry) -> None:
        self.inventory.unrefer(entry)
        self.references[entry] -= 1

    def do_clean(self) -> None:
        dirty = [entry for entry in self.entries if entry in self.dirty]
        if dirty:
            entry = self.choose.choice(dirty)
            self.inventory.clean(entry)
            self.dirty.discard(entry)

    def do_used(self) -> None:
        found = [self.inventory.find(place.address) for place in self.choose.sample(self.places, 5)]
        hints = self.choose.choice([None, Hints(100)])
        self.inventory.used([entry for entry in found if entry is not None], self.now_s, hints)

    def do_retire(self) -> None:
        self.inventory.retire(place.address for place in self.choose.sample(self.places, 5))

    def do_victims(self) -> None:
        evictable = self.evictable()
        wanted_bytes = self.choose.randint(1, 30) * self.unit_bytes
        victims = self.inventory.victims(wanted_bytes)
        assert len(set(victims)) == len(victims) and set(victims) <= evictable
        assert sum(each.size_bytes for each in victims) >= wanted_bytes or set(victims) == evictable
        for at, entry in enumerate(victims):
            assert {other for other in evictable if other.parent == entry.address} <= set(victims[:at])

    def do_drop(self) -> None:
        if self.entries:
            self.inventory.drop(self.choose.choice(self.entries))

    def do_clear(self) -> None:
        namespace = self.choose.choice(NAMESPACES)
        expected = [entry for entry in self.there().values() if entry.place.namespace == namespace]
        found = [entry for entry in self.inventory.entries() if entry.namespace == namespace]
        assert len(found) == len(expected)
        for entry in found:
            self.inventory.drop(entry)

    def holding(self) -> list[TierEntry]:
        """Entries whose room is not given back."""
        self.entries = [entry for entry in self.entries if not entry.is_gone or self.references[entry]]
        self.references = {entry: self.references[entry] for entry in self.entries}
        return self.entries

    def check(self) -> None:
        """Recounts everything."""
        holding, there, inventory = self.holding(), self.there(), self.inventory
        assert all(entry.references == self.references[entry] for entry in holding)
        assert inventory.entries_count == len(there)
        assert inventory.held_bytes == sum(entry.size_bytes for entry in holding)
        assert inventory.held_bytes + self.room.free_bytes == self.room.size_bytes, "A1, and nothing leaks"
        assert inventory.dirty_bytes == sum(entry.size_bytes for entry in there.values() if entry.is_dirty)
        assert inventory.referenced_bytes == sum(entry.size_bytes for entry in holding if entry.references)
        for place in self.places:
            entry = there.get(place.address)
            assert inventory.find(place.address) is (entry if entry is not None and entry.is_ready else None)
            assert entry is None or entry.place == place
        ready = [entry for entry in there.values() if entry.is_ready]
        for shard in {shard_of(place.address) for place in self.places}:
            expected = sorted({print_of(entry.address) for entry in ready if shard_of(entry.address) == shard})
            assert inventory.prints.of(shard).tolist() == expected
        queues = inventory._queues._queues.values()
        by_queue = {id(queue): queue.held_bytes for queue in queues if queue.held_bytes}
        counted: dict[int, int] = {}
        for entry in there.values():
            counted[id(entry.queue)] = counted.get(id(entry.queue), 0) + entry.size_bytes
        assert by_queue == counted
        at_once = sum(entry.size_bytes for entry in self.evictable())
        assert sum(entry.size_bytes for entry in inventory.victims(1 << 40)) == at_once

    def finish(self) -> None:
        """Everybody releases everything: all the room is back."""
        while any(self.references[entry] for entry in self.holding()):
            self.do_finish()
            self.do_unrefer()
        self.check()
        for entry in list(self.there().values()):
            self.inventory.drop(entry)
        assert self.room.free_bytes == self.room.size_bytes
        assert self.inventory.entries_count == self.inventory.held_bytes == 0
        assert not self.inventory._entries and not self.inventory._orphans
        self.inventory.victims(1)
        assert not self.inventory._queues._queues and not self.inventory._queues._turns_count


def some_places(choose: random.Random) -> list[ChunkIdentity]:
    """Chains that share beginnings, in two namespaces, and blocks."""
    places = {place.address: place for number in range(4) for place in [block(number)]}
    for namespace in NAMESPACES:
        trunk = chain(6, seed=1, namespace=namespace)
        for seed in range(2, 5):
            parent = choose.choice(trunk).address
            places |= {place.address: place for place in trunk}
            for number in range(5):
                tokens = (seed * 1_000 + number).to_bytes(4, "little")
                address = chunk_address(namespace, parent, tokens)
                places[address] = ChunkIdentity(namespace, address, parent)
                parent = address
    return list(places.values())


@pytest.mark.parametrize("in_pieces", [False, True], ids=["bytes", "extents"])
def test_e_random_operations_against_a_model(in_pieces: bool) -> None:
    for seed in range(3):
        choose = random.Random(seed)
        unit_bytes = PAGE_BYTES if in_pieces else 7
        room: TierSpace = Extents(40 * unit_bytes) if in_pieces else Bytes(40 * unit_bytes)
        model = Model(TierInventory(room), room, choose, unit_bytes, some_places(choose))
        for number in range(3_000):
            model.step()
            if number % 10 == 0:
                model.check()
        assert model.inventory.evicted_count > 20  # or it was no test of evicting
        model.finish()
