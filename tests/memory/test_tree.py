"""The radix tree against a plain dictionary: its matches, in whatever order chunks come and go."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.address import NO_PARENT, Address, chunk_address, hashed_block_address
from kvstore.core.namespace import NamespaceDigest
from kvstore.tiers.radix_tree import Chunk, Tree

NAMESPACES = [NamespaceDigest(bytes([number]) * 32) for number in (1, 2)]
TOKENS = [bytes([number, 0, 0, 0, 7, 0, 0, 0]) for number in range(3)]
"""Bytes of one chunk: two tokens."""

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def address_of(namespace: NamespaceDigest, path: Path) -> Address:
    address = NO_PARENT
    for number in path:
        address = chunk_address(namespace, address, TOKENS[number])
    return address


@dataclass
class Twin:
    """A tree, and beside it a dictionary that is always right."""

    tree: Tree[Chunk]
    chunks: dict[tuple[NamespaceDigest, Path], Chunk] = field(default_factory=dict)

    def add(self, namespace: NamespaceDigest, path: Path) -> None:
        chunk = Chunk(address_of(namespace, path), address_of(namespace, path[:-1]))
        self.tree.add(namespace, chunk, TOKENS[path[-1]])
        self.chunks[namespace, path] = chunk

    def show(self, namespace: NamespaceDigest, path: Path) -> None:
        if not self.chunks[namespace, path].is_ready:
            self.tree.show(self.chunks[namespace, path])

    def remove(self, namespace: NamespaceDigest, path: Path) -> None:
        chunk = self.chunks.pop((namespace, path))
        self.tree.remove(chunk)
        assert chunk.run.tokens_of(chunk) == TOKENS[path[-1]], "it can still say what it was"

    def toggle(self, namespace: NamespaceDigest, path: Path, gives_up: bool = False) -> None:
        """Absent, there, shown (or given up), absent."""
        chunk = self.chunks.get((namespace, path))
        if chunk is None:
            self.add(namespace, path)
        elif chunk.is_ready or gives_up:
            self.remove(namespace, path)
        else:
            self.show(namespace, path)

    def check(self, namespace: NamespaceDigest, path: Path) -> None:
        """Compares a match of these tokens, and of one byte less, with the dictionary."""
        expected = []
        for end in range(1, len(path) + 1):
            chunk = self.chunks.get((namespace, path[:end]))
            if chunk is None or not chunk.is_ready:
                break
            expected.append(chunk)
        packed = b"".join(TOKENS[number] for number in path)
        assert self.tree.match(namespace, memoryview(packed)) == expected
        assert self.tree.match(namespace, memoryview(packed)[:-1]) == expected[: len(path) - 1]
        assert self.tree.match(namespace, memoryview(packed + b"more")) == expected
        addresses = [address_of(namespace, path[:end]) for end in range(1, len(path) + 1)]
        shown = [chunk is not None and chunk.is_ready for chunk in map(self.tree.find, addresses)]
        for first in range(len(path) + 1):
            assert self.tree.leading(b"".join(addresses), first) == [*shown, False].index(False, first) - first

    def check_all(self) -> None:
        assert len(self.tree) == len(self.chunks) == len(list(self.tree))
        for (namespace, path), chunk in self.chunks.items():
            assert self.tree.find(chunk.address) is chunk
            assert chunk.run.tokens_of(chunk) == TOKENS[path[-1]]
            assert chunk.run.space.namespace == namespace
            # Were it too high, matches would look at every chunk for nothing.
            assert chunk.run.unready_count == sum(not other.is_ready for other in chunk.run.chunks)
            children = [other for where, other in self.chunks if where == namespace and other[:-1] == path]
            assert chunk.children_count == len(children)
            self.check(namespace, path)


@pytest.mark.parametrize("run_bytes_max", [0, 8, 20, 1000])
@given(
    steps=st.lists(st.tuples(st.sampled_from(NAMESPACES), paths, st.booleans()), max_size=60),
    asked=st.lists(paths, max_size=5),
)
def test_a_match_finds_the_longest_prefix_that_is_here_and_ready(
    run_bytes_max: int, steps: list[tuple[NamespaceDigest, Path, bool]], asked: list[Path]
) -> None:
    twin = Twin(Tree(run_bytes_max))
    for namespace, path, gives_up in steps:
        twin.toggle(namespace, path, gives_up)
    twin.check_all()
    for path in asked:
        twin.check(NAMESPACES[0], path)
    for namespace, path in list(twin.chunks):
        twin.remove(namespace, path)
    assert len(twin.tree) == 0
    assert not twin.tree._waiting and not twin.tree._spaces, "nothing is left behind"


@pytest.mark.parametrize("run_bytes_max", [8, 40, 1000])
def test_long_chains_with_branches_that_come_and_go_in_any_order(run_bytes_max: int) -> None:
    choose = random.Random(7)
    twin = Twin(Tree(run_bytes_max))
    trunk = tuple(choose.randrange(3) for _ in range(30))
    branches = [trunk[: choose.randrange(30)] + tuple(choose.randrange(3) for _ in range(10)) for _ in range(6)]
    places = sorted({path[:end] for path in [trunk, *branches] for end in range(1, len(path) + 1)})
    for number in range(6000):
        twin.toggle(NAMESPACES[0], choose.choice(places), choose.random() < 0.1)
        if number % 200 == 0:
            twin.check_all()
    for path in places:
        while (chunk := twin.chunks.get((NAMESPACES[0], path))) is None or not chunk.is_ready:
            twin.toggle(NAMESPACES[0], path)
    twin.check_all()
    choose.shuffle(places)
    for path in places:
        twin.remove(NAMESPACES[0], path)
    assert not twin.tree._waiting and not twin.tree._spaces, "nothing is left behind"


def test_chunks_that_come_last_first_still_make_one_run() -> None:
    """A tier that is filled again from files meets chunks in any order."""
    twin = Twin(Tree())
    orders = list(range(1, 40))
    random.Random(3).shuffle(orders)
    for end in orders:
        twin.add(NAMESPACES[0], (1,) * end)
    assert len({id(chunk.run) for chunk in twin.chunks.values()}) == 1


def test_blocks_without_tokens_are_found_by_address_alone() -> None:
    tree: Tree[Chunk] = Tree()
    blocks = [Chunk(hashed_block_address(NAMESPACES[0], bytes([number]) * 16), NO_PARENT) for number in range(3)]
    for block in blocks:
        tree.add(NAMESPACES[0], block, b"")
        tree.show(block)
    assert [tree.find(block.address) for block in blocks] == blocks
    assert all(block.children_count == 0 and block.run.tokens_of(block) == b"" for block in blocks)
    assert tree.match(NAMESPACES[0], memoryview(TOKENS[0])) == []
    assert tree.leading(b"".join(block.address for block in blocks) * 2) == 6
    assert tree.leading(NO_PARENT + blocks[0].address) == 0
    for block in blocks:
        tree.remove(block)
    assert not len(tree) and not tree._spaces
