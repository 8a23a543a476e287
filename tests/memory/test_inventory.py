"""The inventory, case by case (E1 to E4, I2)."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kvstore.address import NO_PARENT, Address
from kvstore.hints import Hints
from kvstore.keyset import ChunkKeys
from kvstore.layout import Layout
from kvstore.memory.arena import PAGE_BYTES, Extents
from kvstore.memory.inventory import EVICTED_TIMES_MAX, POLICIES, Inventory, Place, print_of, shard_of
from kvstore.namespace import Namespace
from kvstore.tokens import token_array
from tests.kit.memory import NAMESPACES, Bytes, block, chain, fill, lru


def test_e1_nobody_sees_a_claimed_entry() -> None:
    inventory = lru(Bytes(100))
    (place,) = chain(1)
    entry = inventory.claim(place, 10, 0.0)
    assert entry is not None
    assert inventory.find(place.address) is None
    assert inventory.leading(place.address) == 0
    assert inventory.match(place.namespace, memoryview(place.tokens)) == []
    assert not inventory.pin(place.address)
    assert inventory.changes() == set() and not len(inventory.prints(shard_of(place.address)))
    assert inventory.ready(entry)
    assert inventory.find(place.address) is entry
    assert inventory.leading(place.address) == 1
    assert inventory.match(place.namespace, memoryview(place.tokens)) == [entry]


def test_e1_what_is_only_claimed_is_not_evicted_even_when_nobody_refers_to_it() -> None:
    inventory = lru(Bytes(10))
    entry = inventory.claim(block(0), 10, 0.0)
    assert entry is not None
    inventory.unrefer(entry)
    assert inventory.victims(1) == [] and inventory.claim(block(1), 10, 1.0) is None
    inventory.ready(entry)
    assert inventory.victims(1) == [entry]


def test_e1_children_go_before_their_parents_and_the_oldest_chain_first() -> None:
    inventory = lru(Bytes(80))
    old = fill(inventory, chain(4, seed=1), now_s=1.0)
    new = fill(inventory, chain(4, seed=2), now_s=2.0)
    order = [*old[::-1], *new[::-1]]
    assert inventory.victims(80) == order
    assert inventory.victims(25) == order[:3]
    for number in range(8):
        entry = inventory.claim(block(number), 10, 3.0)
        assert entry is not None
        assert [each.is_gone for each in order] == [True] * (number + 1) + [False] * (7 - number)
    assert inventory.claim(block(9), 10, 4.0) is None, "all that is left is being written"


def test_e1_a_parent_does_not_go_for_its_own_child() -> None:
    inventory = lru(Bytes(20))
    places = chain(3)
    fill(inventory, places[:2])
    assert inventory.claim(places[2], 10, 1.0) is None
    assert inventory.leading(b"".join(place.address for place in places)) == 2


def test_e1_claiming_evicts_no_more_than_it_needs_and_nothing_in_vain() -> None:
    inventory = lru(Bytes(100))
    entries = fill(inventory, map(block, range(9)), size_bytes=10)
    claimed = inventory.claim(block(20), 30, 1.0)
    assert claimed is not None
    assert [entry.is_gone for entry in entries] == [True] * 2 + [False] * 7, "ten bytes were free"
    for entry in entries[2:6]:
        inventory.refer(entry)
    assert inventory.claim(block(21), 40, 1.0) is None
    assert inventory.claim(block(22), 101, 1.0) is None
    assert not any(entry.is_gone for entry in entries[2:])
    assert inventory.evicted_count == 2 and inventory.evicted_bytes == 20


def test_e2_what_is_referenced_pinned_or_dirty_stays() -> None:
    inventory = lru(Bytes(40))
    referenced, pinned, plain = fill(inventory, map(block, range(3)))
    dirty = inventory.claim(block(3), 10, 0.0, dirty=True)
    assert dirty is not None
    inventory.ready(dirty)
    inventory.unrefer(dirty)
    inventory.refer(referenced)
    assert inventory.pin(pinned.address)
    assert inventory.claim(block(10), 20, 1.0) is None
    assert inventory.victims(1_000) == [plain]
    inventory.unrefer(referenced)
    inventory.unpin(pinned.address)
    inventory.clean(dirty)
    assert not dirty.is_dirty
    assert set(inventory.victims(1_000)) == {referenced, pinned, plain, dirty}
    assert inventory.claim(block(10), 40, 1.0) is not None


def test_e2_the_ancestors_of_what_stays_stay() -> None:
    inventory = lru(Bytes(60))
    entries = fill(inventory, chain(6))
    inventory.refer(entries[3])
    assert inventory.victims(1_000) == [entries[5], entries[4]]


def test_e2_pins_are_counted_and_are_of_the_address() -> None:
    inventory = lru(Bytes(20))
    (entry,) = fill(inventory, [block(0)])
    assert inventory.pin(entry.address) and inventory.pin(entry.address)
    assert not inventory.pin(block(1).address)
    inventory.unpin(block(1).address)
    inventory.unpin(entry.address)
    assert inventory.pinned_bytes == 10 and inventory.victims(1) == []
    inventory.drop(entry)
    assert inventory.pinned_bytes == 0
    (again,) = fill(inventory, [block(0)])
    assert inventory.pinned_bytes == 10 and inventory.victims(1) == []
    inventory.unpin(entry.address)
    inventory.unpin(entry.address)
    assert inventory.pinned_bytes == 0 and inventory.victims(1) == [again]


def test_e4_the_first_writer_wins() -> None:
    inventory = lru(Bytes(100))
    first = inventory.claim(block(0), 10, 0.0)
    assert first is not None
    assert inventory.claim(block(0), 10, 0.0) is None
    inventory.ready(first)
    assert inventory.claim(block(0), 10, 0.0) is None
    inventory.drop(first)
    assert inventory.claim(block(0), 10, 0.0) is not None, "gone: it may come back"


def test_i2_room_is_given_back_only_when_nobody_refers_to_it() -> None:
    inventory = lru(room := Bytes(10))
    (entry,) = fill(inventory, [block(0)])
    inventory.refer(entry)
    inventory.refer(entry)
    inventory.drop(entry)
    inventory.drop(entry)
    assert inventory.find(entry.address) is None
    assert entry.place == block(0), "it can still say what it was"
    inventory.unrefer(entry)
    assert room.free_bytes == 0 and inventory.held_bytes == inventory.referenced_bytes == 10
    assert inventory.claim(block(1), 10, 1.0) is None
    inventory.unrefer(entry)
    assert room.free_bytes == 10 and inventory.held_bytes == inventory.referenced_bytes == 0
    with pytest.raises(AssertionError):
        inventory.unrefer(entry)
    with pytest.raises(AssertionError):
        inventory.refer(entry)


def test_a_claim_that_is_given_up_leaves_nothing() -> None:
    inventory = lru(room := Bytes(10))
    entry = inventory.claim(block(0), 10, 0.0, dirty=True)
    assert entry is not None
    inventory.drop(entry)
    assert not inventory.ready(entry), "as when its namespace was cleared while it was being written"
    inventory.unrefer(entry)
    assert room.free_bytes == 10 and inventory.dirty_bytes == inventory.entries_count == 0
    inventory.clean(entry)
    assert inventory.dirty_bytes == 0


def test_claiming_gives_up_where_room_is_in_pieces() -> None:
    """Every other page is in use: no eviction makes two that touch, until those in use are given up."""
    count = 64
    inventory = lru(extents := Extents(count * PAGE_BYTES))
    entries = [fill(inventory, [block(number)], float(number), PAGE_BYTES)[0] for number in range(count)]
    for entry in entries[::2]:
        inventory.refer(entry)
    assert inventory.claim(block(count), 2 * PAGE_BYTES, 99.0) is None
    assert inventory.evicted_bytes == EVICTED_TIMES_MAX * 2 * PAGE_BYTES
    inventory.unrefer(entries[2])
    assert inventory.claim(block(count), 2 * PAGE_BYTES, 99.0) is not None
    assert extents.largest_bytes == PAGE_BYTES


def test_clearing_a_namespace_takes_all_of_it_and_nothing_else() -> None:
    inventory = lru(Bytes(100))
    mine = fill(inventory, chain(3))
    other = fill(inventory, chain(3, namespace=NAMESPACES[1]))
    claimed = inventory.claim(block(0), 10, 0.0, dirty=True)
    assert claimed is not None
    found = inventory.of_namespace(NAMESPACES[0])
    assert found == [claimed, *reversed(mine)], "the latest first: children before parents"
    for entry in found:
        inventory.drop(entry)
    assert inventory.entries_count == 3 and inventory.held_bytes == 40, "the claimant still writes"
    assert not any(entry.is_gone for entry in other)


def test_leading_counts_from_an_index_on() -> None:
    inventory = lru(Bytes(100))
    places = chain(6)
    entries = fill(inventory, places)
    addresses = [place.address for place in places]
    inventory.drop(entries[4])
    assert [inventory.leading(b"".join(addresses), first) for first in range(8)] == [4, 3, 2, 1, 0, 1, 0, 0]


def test_a_chain_of_tokens_has_the_places_that_match() -> None:
    namespace = Namespace("model", Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=4))
    prompt = token_array(np.arange(20))
    found = ChunkKeys.of(namespace, prompt)
    inventory = lru(Bytes(100))
    entries = fill(inventory, [found.place(index) for index in range(len(found))])
    assert inventory.match(namespace.digest, prompt.data.cast("B")) == entries
    assert inventory.leading(found.packed_addresses) == 5
    assert [entry.place for entry in entries] == [found.place(index) for index in range(5)]


def test_uses_are_noted_and_hints_are_raised_never_lowered() -> None:
    inventory = lru(Bytes(100))
    (entry,) = fill(inventory, [block(0)])
    inventory.used([entry], 5.0, Hints(priority=70, ttl_s=300))
    assert (entry.uses, entry.used_s, entry.hints) == (1, 5.0, Hints(priority=70, ttl_s=None))
    inventory.used([entry], 4.0, Hints(priority=10))
    assert (entry.uses, entry.used_s, entry.priority) == (2, 5.0, 70)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_retired_goes_before_all_others_until_it_is_used_again(policy: str) -> None:
    inventory = Inventory(Bytes(100), POLICIES[policy]())
    old = fill(inventory, chain(3, seed=1), now_s=0.0)
    new = fill(inventory, chain(3, seed=2), now_s=100.0)
    inventory.retire(new)
    assert inventory.victims(1_000) == [*new[::-1], *old[::-1]]
    inventory.used(new[:2], 101.0)
    assert inventory.victims(1_000)[:2] == [new[2], old[2]]
    inventory.drop(new[2])
    inventory.retire([new[2]])
    assert inventory.leading(b"".join(entry.address for entry in new)) == 2, "nothing else is lost"


def test_prints_tell_what_is_ready_and_which_shards_changed() -> None:
    inventory = lru(Bytes(10_000))
    entries = fill(inventory, map(block, range(500)))
    assert inventory.changes() == {shard_of(entry.address) for entry in entries}
    assert inventory.changes() == set()
    for entry in entries[::2]:
        inventory.drop(entry)
    for shard in range(64):
        expected = sorted({print_of(entry.address) for entry in entries[1::2] if shard_of(entry.address) == shard})
        assert inventory.prints(shard).tolist() == expected
        assert inventory.prints(shard).dtype == np.uint32


def test_two_addresses_with_one_print_are_told_until_both_are_gone() -> None:
    inventory = lru(Bytes(100))
    twins = [Address(bytes([9, 0, 0, 0, 1, 2, 3, 4, number]) + bytes(7)) for number in range(2)]
    entries = fill(inventory, [Place(NAMESPACES[0], address, NO_PARENT, b"") for address in twins])
    assert inventory.prints(2).tolist() == [0x04030201]
    inventory.drop(entries[0])
    assert inventory.prints(2).tolist() == [0x04030201]
    inventory.drop(entries[1])
    assert inventory.prints(2).tolist() == []


def test_turns_that_no_longer_count_are_not_kept() -> None:
    """Without pressure no turn ever surfaces, however often entries are used, dropped and brought back."""
    inventory = lru(Bytes(1_000))
    entries = fill(inventory, map(block, range(10)))
    for number in range(5_000):
        inventory.used(entries, float(number))
        inventory.drop(entries.pop())
        entries += fill(inventory, [block(20 + number)])
    turns = sum(len(queue.turns) for queue in inventory._queues._queues.values())
    assert turns <= 2 * 10 + 64


def test_what_is_gone_does_not_wait_for_the_cyclic_collector() -> None:
    """Which engines switch off: then it would never go."""
    inventory = lru(Bytes(200))
    fill(inventory, [block(0)])
    gc.collect()
    gc.disable()
    try:
        for seed in range(50):
            inventory.drop(fill(inventory, chain(20, seed), float(seed))[10])
        assert inventory.evicted_count > 500
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        # Threads of other tests may have left something meanwhile.
        assert not [each for each in gc.garbage if type(each).__module__.startswith("kvstore.memory")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_looking_for_victims_changes_nothing() -> None:
    inventory = lru(Bytes(1_000))
    fill(inventory, [place for seed in range(5) for place in chain(10, seed)])
    everything = inventory.victims(10_000)
    assert len(everything) == 50
    for wanted in (1, 55, 10_000, 200):
        assert inventory.victims(wanted) == everything[: -(-min(wanted, 500) // 10)]
    for number in range(50):
        assert inventory.claim(block(number), 510, float(number)) is not None or number
        break
    assert [entry.is_gone for entry in everything] == [True] + [False] * 49
