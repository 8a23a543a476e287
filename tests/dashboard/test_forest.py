"""The forest of prefixes: every chunk in one run, sums that add up, paths that lead back."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.address import NO_PARENT, Address
from kvstore.core.namespace import NamespaceId
from kvstore.dashboard.prefix_tree import ORDERS, Forest, Leaf

ONE, TWO = NamespaceId(b"namespc1"), NamespaceId(b"namespc2")


def address(number: int) -> Address:
    return Address(number.to_bytes(16, "big"))


def grown(
    parents: dict[int, int], *, sizes: dict[int, int] | None = None, namespace: NamespaceId = ONE, weight: float = 1.0
) -> Forest:
    """A forest by number of chunk and of its parent; 0 is no parent."""
    leaves: dict[Address, Leaf] = {}
    for number, parent in parents.items():
        depth, above = 0, parent
        while above:
            depth, above = depth + 1, parents.get(above, 0)
        leaves[address(number)] = Leaf(
            address(number),
            address(parent) if parent else NO_PARENT,
            namespace,
            depth,
            (sizes or {}).get(number, 10),
            1000 + number,
            0,
            weight,
        )
    return Forest(1.0, True, leaves)


def test_a_run_ends_where_two_prompts_part() -> None:
    forest = grown({1: 0, 2: 1, 3: 2, 4: 2, 5: 4})
    runs = {int.from_bytes(run.id): run for run in forest.runs(None, None, 10, "bytes")}
    assert {number: run.chunks for number, run in runs.items()} == {1: 2, 3: 1, 4: 2}
    assert runs[1].forks == 2 and runs[1].below.size_bytes == 50 and runs[1].below.ends_count == 2
    assert runs[3].above == runs[4].above == address(1)
    assert runs[4].first == 2 and runs[1].below.depth_max == 4


def test_an_ancestor_that_a_sample_hangs_on_adds_nothing_to_sums() -> None:
    leaves = {
        address(1): Leaf(address(1), NO_PARENT, ONE, 0, 10, 5, 0, 0.0),
        address(2): Leaf(address(2), address(1), ONE, 1, 10, 5, 0, 4.0),
    }
    forest = Forest(0.25, True, leaves)
    assert forest.namespaces()[ONE].chunks == 4 and forest.namespaces()[ONE].size_bytes == 40


@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from(ORDERS))
def test_every_chunk_is_in_one_run(seed: int, count: int, order: str) -> None:
    draw = random.Random(seed)
    forest = grown({number: draw.randrange(number) for number in range(1, count + 1)})
    runs = forest.runs(None, None, 10_000, order)
    assert sum(run.chunks for run in runs) == count
    assert sum(run.below.size_bytes for run in runs if run.above is None) == 10 * count
    seen: set[Address] = set()
    for run in runs:
        assert run.above is None or run.above in seen, "a parent comes before its children"
        seen.add(run.id)
        way = forest.way_to(run.id)
        assert [each.id for each in way][-1:] == ([run.above] if run.above else [])
        assert sum(each.chunks for each in way) == run.first
