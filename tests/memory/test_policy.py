"""Policies: the order of eviction, each against its stated rule; and what is worth bringing in."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from kvstore.address import NO_PARENT, Address, hashed_block_address
from kvstore.hints import DEFAULT, Hints
from kvstore.memory.inventory import (
    DEFAULT_POLICY,
    POLICIES,
    PROBATION_SHARE,
    Admission,
    Entry,
    Inventory,
    Place,
    Policy,
)
from kvstore.namespace import NamespaceDigest
from kvstore_gc.policy import Order, Uses, ranks
from tests.kit.memory import Bytes

NAMESPACE = NamespaceDigest(b"n" * 32)
SIZE_BYTES = 10


def address(number: int) -> Address:
    return hashed_block_address(NAMESPACE, number.to_bytes(16, "big"))


def put(
    inventory: Inventory, number: int, now_s: float, hints: Hints = DEFAULT, uses: int = 0, *, replica: bool = False
) -> Entry:
    """A block, written at ``now_s`` and used as often at that moment."""
    place = Place(NAMESPACE, address(number), NO_PARENT, b"")
    entry = inventory.claim(place, SIZE_BYTES, now_s, hints, replica=replica)
    assert entry is not None
    inventory.ready(entry)
    for _ in range(uses):
        inventory.used([entry], now_s)
    inventory.unrefer(entry)
    return entry


def inventory_of(policy: str, count: int = 1_000) -> Inventory:
    made: Policy = POLICIES[policy]()
    return Inventory(Bytes(count * SIZE_BYTES), made)


def order(inventory: Inventory) -> list[Entry]:
    return inventory.victims(1 << 40)


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT_POLICY in POLICIES


def test_lru_takes_what_is_unused_for_longest() -> None:
    choose = random.Random(1)
    inventory = inventory_of("lru")
    entries = [put(inventory, number, float(number), uses=choose.randrange(4)) for number in range(200)]
    choose.shuffle(entries)
    for at, entry in enumerate(entries):
        inventory.used([entry], 1_000.0 + at)
    assert order(inventory) == entries


@pytest.mark.parametrize(("policy", "rule"), [("lru", Order.LRU), ("uses", Order.USES)])
def test_uses_and_hints_weigh_as_they_do_on_the_root(policy: str, rule: Order) -> None:
    """The order is the collector's, for chunks that say the same."""
    choose = random.Random(2)
    inventory = inventory_of(policy)
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
        priority=np.array([entry.priority for entry in entries]),
        ttl_s=np.full(300, 1 << 40),
        superseded=np.zeros(300, np.int64),
    )
    rank = dict(zip(entries, ranks(told, np.zeros(300, np.int64), now_s, rule) >> 39, strict=True))
    found = [rank[entry] for entry in order(inventory)]
    # Equal but for the rounding of the collector's logarithm.
    assert all(later >= earlier - 1 for earlier, later in pairwise(found))
    assert len(set(found)) > 200


def test_what_is_past_its_ttl_goes_first_and_the_ttl_counts_from_the_last_use() -> None:
    inventory = inventory_of("uses")
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


@pytest.mark.parametrize("policy", POLICIES)
def test_p4_a_replica_goes_before_a_sole_copy_that_is_not_twice_as_old(policy: str) -> None:
    inventory = inventory_of(policy)
    own = put(inventory, 0, 0.0)
    replica = put(inventory, 1, 50.0, replica=True)
    inventory.used([], 60.0)
    assert order(inventory) == [own, replica], "90 s and 40 s, with what is added to every age"
    inventory.used([], 80.0)
    assert order(inventory) == [replica, own], "110 s and 60 s"


@pytest.mark.parametrize("policy", POLICIES)
def test_p4_a_full_node_keeps_the_replicas_that_are_used(policy: str) -> None:
    inventory = inventory_of(policy, 100)
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


def test_two_queue_lets_a_scan_pass_without_losing_what_is_used() -> None:
    count = 100
    inventory = inventory_of("two_queue", count)
    hot = [put(inventory, number, 0.0, uses=1) for number in range(80)]
    for number in range(1_000):
        put(inventory, 1_000 + number, 1.0 + number)
    assert not any(entry.is_gone for entry in hot)
    lru = inventory_of("lru", count)
    hot = [put(lru, number, 0.0, uses=1) for number in range(80)]
    for number in range(1_000):
        put(lru, 1_000 + number, 1.0 + number)
    assert all(entry.is_gone for entry in hot), "which is the difference"


def test_two_queue_keeps_those_on_probation_to_their_share() -> None:
    inventory = inventory_of("two_queue", 100)
    new = [put(inventory, number, float(number)) for number in range(100)]
    used = [put(inventory, 1_000 + number, 100.0 + number, uses=1) for number in range(300)]
    left = sum(not entry.is_gone for entry in new)
    assert left == PROBATION_SHARE * 100
    assert sum(not entry.is_gone for entry in used) == 100 - left


def test_two_queue_does_not_put_on_probation_again_what_comes_back() -> None:
    inventory = inventory_of("two_queue", 10)
    first = put(inventory, 0, 0.0)
    for number in range(1, 11):
        put(inventory, number, float(number))
    assert first.is_gone
    again = put(inventory, 0, 20.0)
    for number in range(11, 30):
        put(inventory, number, 20.0 + number)
    assert not again.is_gone


def test_r2_admission_knows_what_was_asked_for_lately_and_forgets_the_rest() -> None:
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


def test_r2_what_was_asked_for_long_ago_does_not_count() -> None:
    for later_s, is_known in ((20.0, True), (61.0, False), (1_000.0, False)):
        admission = Admission(addresses_max=100, lasts_s=60.0)
        admission.asked(address(0), 0.0)
        admission.asked(address(1), 31.0)
        assert admission.asked(address(0), 31.0 + later_s) == is_known
