"""The inventory, case by case (E1 to E4, I2): what the model does not show. And the order of eviction."""

from __future__ import annotations

import gc
import random
from itertools import pairwise

import numpy as np

from kvstore.core.address import NO_PARENT, Address, hashed_block_address
from kvstore.core.recency import DEFAULT, Hints
from kvstore.tiers.inventory import Admission, ChunkIdentity, TierEntry, TierInventory
from kvstore_gc.policy import EvictionOrder, Uses, ranks
from tests.kit.memory import NAMESPACES, Bytes, block, chain, fill, lru


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


def test_retired_entry_is_evicted_first_until_used_again() -> None:
    inventory = lru(Bytes(100))
    old = fill(inventory, chain(3, seed=1), now_s=0.0)
    new = fill(inventory, chain(3, seed=2), now_s=100.0)
    inventory.retire([entry.address for entry in new])
    assert inventory.victims(1_000) == [*new[::-1], *old[::-1]]
    inventory.used(new[:2], 101.0)
    assert inventory.victims(1_000)[:2] == [new[2], old[2]]
    inventory.drop(new[2])
    inventory.retire([new[2].address])
    assert inventory.leading([entry.address for entry in new]) == 2, "nothing else is lost"


def test_two_addresses_with_one_print_are_told_until_both_are_gone() -> None:
    inventory = lru(Bytes(100))
    twins = [Address(bytes([9, 0, 0, 0, 1, 2, 3, 4, number]) + bytes(7)) for number in range(2)]
    entries = fill(inventory, [ChunkIdentity(NAMESPACES[0], address, NO_PARENT) for address in twins])
    assert inventory.prints.of(2).tolist() == [0x04030201]
    inventory.drop(entries[0])
    assert inventory.prints.of(2).tolist() == [0x04030201]
    inventory.drop(entries[1])
    assert inventory.prints.of(2).tolist() == []


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
        assert not [each for each in gc.garbage if type(each).__module__.startswith("kvstore.tiers")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# The order of eviction, and admission.

SIZE_BYTES = 10


def address(number: int) -> Address:
    return hashed_block_address(NAMESPACES[0], number.to_bytes(16, "big"))


def put(
    inventory: TierInventory, number: int, now_s: float, hints: Hints = DEFAULT, uses: int = 0, *, replica: bool = False
) -> TierEntry:
    """A block, written at ``now_s`` and used as often at that moment."""
    place = ChunkIdentity(NAMESPACES[0], address(number), NO_PARENT)
    entry = inventory.claim(place, SIZE_BYTES, now_s, hints, replica=replica)
    assert entry is not None
    inventory.ready(entry)
    for _ in range(uses):
        inventory.used([entry], now_s)
    inventory.unrefer(entry)
    return entry


def order(inventory: TierInventory) -> list[TierEntry]:
    return inventory.victims(1 << 40)


def test_eviction_order_of_memory_is_that_of_the_root() -> None:
    choose = random.Random(2)
    inventory = TierInventory(Bytes(1_000 * SIZE_BYTES))
    entries = []
    for number in range(300):
        hints = Hints(choose.choice([10, 35, 50, 60, 70]))
        entries.append(put(inventory, number, float(number), hints, choose.randrange(6)))
    now_s = 320.0
    inventory.used([], now_s)
    told = Uses(
        last_use_s=np.array([int(entry.used_s) for entry in entries]),
        depth=np.zeros(300, np.int64),
        uses=np.array([min(entry.uses, 3) for entry in entries]),
        priority=np.array([entry.hints.priority for entry in entries]),
        ttl_s=np.full(300, 1 << 40),
    )
    rank = dict(zip(entries, ranks(told, np.zeros(300, np.int64), now_s, EvictionOrder.LRU) >> 39, strict=True))
    found = [rank[entry] for entry in order(inventory)]
    # Equal but for the rounding of the collector's logarithm.
    assert all(later >= earlier - 1 for earlier, later in pairwise(found))
    assert len(set(found)) > 150


def test_entry_past_its_ttl_is_evicted_first() -> None:
    inventory = TierInventory(Bytes(100))
    never = put(inventory, 0, 0.0)
    short = put(inventory, 1, 100.0, Hints(priority=100, ttl_s=300), uses=3)
    long = put(inventory, 2, 100.0, Hints(priority=100, ttl_s=1_800), uses=3)
    inventory.used([], 399.0)
    assert order(inventory)[0] is never
    inventory.used([], 400.0)
    assert order(inventory)[0] is short
    inventory.used([short], 400.0)
    assert order(inventory)[0] is never
    inventory.used([], 1_900.0)
    assert order(inventory)[:2] == [long, short]


def test_p4_replica_counts_as_twice_as_old() -> None:
    inventory = TierInventory(Bytes(100))
    own = put(inventory, 0, 0.0)
    replica = put(inventory, 1, 50.0, replica=True)
    inventory.used([], 60.0)
    assert order(inventory) == [own, replica], "90 s and 40 s, with what is added to every age"
    inventory.used([], 80.0)
    assert order(inventory) == [replica, own], "110 s and 60 s"


def test_p4_full_node_keeps_replicas_in_use() -> None:
    inventory = TierInventory(Bytes(100 * SIZE_BYTES))
    for number in range(100):
        put(inventory, number, float(number))
    hits = 0
    for step in range(1_000):
        now_s = 100.0 + step
        put(inventory, 1_000 + step, now_s)
        entry = inventory.find(address(500 + step % 10))
        if entry is None:
            put(inventory, 500 + step % 10, now_s, replica=True)
        else:
            inventory.used([entry], now_s)
            hits += 1
    assert hits > 900


def test_r2_admission_is_bounded_by_count() -> None:
    admission = Admission(addresses_max=100, lasts_s=60.0)
    assert not admission.asked(address(0), 0.0)
    assert admission.asked(address(0), 1.0)
    assert not admission.knows(address(1))
    for number in range(1, 50):
        assert not admission.asked(address(number), 2.0)
    assert admission.asked(address(0), 3.0), "half of the bound is remembered at least"
    for number in range(100, 200):
        admission.asked(address(number), 4.0)
    assert not admission.knows(address(1)), "and all of it at most"
    assert len(admission._new) + len(admission._old) <= 100


def test_r2_admission_is_bounded_by_time() -> None:
    for later_s, is_known in ((20.0, True), (61.0, False), (1_000.0, False)):
        admission = Admission(addresses_max=100, lasts_s=60.0)
        admission.asked(address(0), 0.0)
        admission.asked(address(1), 31.0)
        assert admission.asked(address(0), 31.0 + later_s) == is_known
