"""The inventory against a plain model: sets of chunks, and prefixes counted by hand."""

from __future__ import annotations

import numpy as np

from kvstore.events.columns import NO_ROW, U64, Rows
from kvstore.events.inventory import DEAD_MIN, Identities, NamespaceIndex
from tests.kit.cases import for_each

LAST = (1 << 64) - 1
PRIME = 0x9E3779B97F4A7C15


def key(chain: int, depth: int) -> int:
    return (chain * 1000 + depth + 1) * PRIME % (1 << 64)


class Model:
    """What must be told: chunks that are there, not condemned, and all before them as well."""

    def __init__(self) -> None:
        self.there: set[tuple[int, int]] = set()
        self.condemned: set[tuple[int, int]] = set()

    def told(self) -> set[tuple[int, int]]:
        good = self.there - self.condemned
        return {(chain, depth) for chain, depth in good if all((chain, above) in good for above in range(depth))}


def numbers(chunks: list[tuple[int, int]]) -> U64:
    return np.array([key(*each) for each in chunks], np.uint64)


def learn(inventory: NamespaceIndex, chunks: list[tuple[int, int]]) -> None:
    above = [(chain, max(depth - 1, 0)) for chain, depth in chunks]
    depths = np.array([depth for _, depth in chunks], np.uint32)
    tokens = np.array([[chain, depth] for chain, depth in chunks], np.uint32).reshape(-1, 2)
    inventory.learn(Identities(numbers(chunks), ~numbers(chunks), numbers(above), ~numbers(above), depths, tokens))


def arrive(inventory: NamespaceIndex, chunks: list[tuple[int, int]]) -> None:
    inventory.arrived(numbers(chunks), ~numbers(chunks))


def chunks_of(inventory: NamespaceIndex, rows: Rows) -> list[tuple[int, int]]:
    return [(int(chain), int(depth)) for chain, depth in inventory.rows.tokens.read(rows)]


def check_replay(heard: set[tuple[int, int]], inventory: NamespaceIndex) -> None:
    """Applies the difference to what a subscriber has; each event must change something, parents come first."""
    found = inventory.settle()
    for each in chunks_of(inventory, found.removed):
        heard.remove(each)
    for chain, depth in chunks_of(inventory, found.stored):
        assert (chain, depth) not in heard
        assert depth == 0 or (chain, depth - 1) in heard, "a parent is told before its child"
        heard.add((chain, depth))


@for_each("seed", range(5))
def test_the_differences_add_up_to_what_match_would_find(seed: int) -> None:
    random = np.random.default_rng(seed)
    inventory, model, heard = NamespaceIndex(2), Model(), set[tuple[int, int]]()
    known: set[tuple[int, int]] = set()
    everything = [(chain, depth) for chain in range(6) for depth in range(12)]
    for _ in range(60):
        some = [each for each in everything if random.random() < 0.15]
        act = random.integers(4)
        if act == 0:
            arrive(inventory, some)
            model.there |= set(some)
        elif act == 1:
            inventory.left(numbers(some))
            model.there -= set(some)
        elif act == 2:
            rows = inventory.rows.find(numbers(some))
            inventory.condemn(rows[rows != NO_ROW])
            model.condemned |= {each for each, row in zip(some, rows, strict=True) if row != NO_ROW}
        else:  # a listing of two parts, or of everything
            cuts = sorted(random.integers(0, LAST, 3, np.uint64).tolist())
            ranges = [(0, cuts[0]), (cuts[1], cuts[2])] if random.random() < 0.5 else [(0, LAST)]
            listed = {each for each in everything if any(first <= key(*each) <= last for first, last in ranges)}
            found = [each for each in some if each in listed]
            inventory.listed(ranges, numbers(found), ~numbers(found))
            model.there = (model.there - listed) | set(found)
            model.condemned -= listed
        inventory.unknown()
        learn(inventory, sorted(model.there - known))
        known |= model.there
        check_replay(heard, inventory)
        assert heard == model.told()
        assert inventory.published_count == len(heard)
        assert set(chunks_of(inventory, inventory.snapshot())) == heard


def test_a_listing_of_a_part_takes_nothing_from_the_other_parts() -> None:
    inventory = NamespaceIndex(2)
    chunks = [(chain, 0) for chain in range(200)]
    arrive(inventory, chunks)
    learn(inventory, chunks)
    inventory.settle()
    half = 1 << 63
    inventory.listed([(0, half - 1)], np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    removed = inventory.settle().removed
    assert set(chunks_of(inventory, removed)) == {each for each in chunks if key(*each) < half}


def test_compacting_forgets_what_is_gone_and_keeps_what_is_told() -> None:
    inventory, count = NamespaceIndex(2), 2 * DEAD_MIN
    chunks = [(chain, depth) for chain in range(count // 4) for depth in range(4)]
    arrive(inventory, chunks)
    learn(inventory, chunks)
    inventory.settle()
    gone = [each for each in chunks if each[0] % 8]
    inventory.left(numbers(gone))
    holes = [(chain, 1) for chain in range(0, count // 4, 16)]
    inventory.left(numbers(holes))
    inventory.settle()
    before = set(chunks_of(inventory, inventory.snapshot()))
    assert inventory.compact()
    assert inventory.rows.count == len(chunks) - len(gone), "parents of what is there stay"
    arrive(inventory, holes)
    learn(inventory, holes)
    behind = {(chain, depth) for chain, _ in holes for depth in (1, 2, 3)}
    assert set(chunks_of(inventory, inventory.settle().stored)) == behind
    before |= behind
    assert set(chunks_of(inventory, inventory.snapshot())) == before
    inventory.left(numbers([(0, 1)]))
    assert set(chunks_of(inventory, inventory.settle().removed)) == {(0, 1), (0, 2), (0, 3)}
