"""A look at a root for its prefixes: all of a small root, a connected sample of a large one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstore.client.store import Store
from kvstore.core.address import NO_PARENT
from kvstore.dashboard.prefix_tree import explore
from kvstore.errors import Unavailable
from kvstore.root.identity import RootIdentity, read_identity
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.faulty_root import EIO, FaultyRoot, Rule
from tests.kit.stores import TINY, kv_of, store_on

FAST = 1e9
PROMPTS, CHUNKS_EACH = 24, 16


@dataclass(frozen=True, slots=True)
class Stored:
    store: Store
    root: MemoryRoot
    identity: RootIdentity


@pytest.fixture(scope="module")
def stored() -> Iterator[Stored]:
    """Stores prompts of 16 chunks each; six of them share the first 4."""
    files = MemoryFiles()
    with store_on(MemoryRoot(files)) as store:
        cache = store.namespace("model", TINY)
        for number in range(PROMPTS):
            shared, own = [number % 4] * 16, [number] * 48
            cache.put([*shared, *own], kv_of(TINY, [*shared, *own]))
        root = MemoryRoot(files)
        identity = read_identity(root)
        assert identity is not None
        yield Stored(store, root, identity)


def test_a_sample_hangs_together_and_says_how_much_it_stands_for(stored: Stored) -> None:
    forest = explore(stored.root, stored.identity, chunks_max=60, per_s_max=FAST)
    assert forest.share < 0.6 and forest.is_whole
    for leaf in forest.leaves.values():
        assert leaf.parent == NO_PARENT or leaf.parent in forest.leaves
    assert all(run.is_rooted for run in forest.runs(None, None, 1_000, "bytes"))
    sampled = [leaf for leaf in forest.leaves.values() if leaf.weight]
    assert {leaf.weight for leaf in sampled} == {1 / forest.share}
    (total,) = forest.namespaces().values()
    assert total.chunks == pytest.approx(len(sampled) / forest.share)


def test_a_root_that_fails_is_no_empty_forest(stored: Stored) -> None:
    with pytest.raises(Unavailable):
        explore(FaultyRoot(stored.root, [Rule("list", EIO)]), stored.identity, per_s_max=FAST)
