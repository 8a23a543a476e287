"""Places for the chunks of a test: they are put, moved and damaged, and read in every way.

Separate from the node, which knows nothing of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvstore.core.write_mode import WriteMode
from kvstore.errors import HoldBroken
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import FaultyRoot
from tests.kit.stores import flip, same
from tests.kit.tiers import Acting, eventually


def to_disk(node: Acting, number: int, stop: int, first: int) -> None:
    """Moves chunks from memory to the local disk."""
    disk = node.tiers.disk
    assert disk is not None
    eventually(lambda: not node.stat("disk_refilling"))
    with node.memory.refer(node.chain(number, stop), first, stop - first) as slots:
        for index, entry in enumerate(slots.referred, first):
            assert disk.add(entry.place, slots.images(index, index + 1)[0], entry.hints)
        node.memory.evict(slots.referred[::-1])
    assert not any(node.in_memory(number, stop)[first:]) and all(node.on_disk(number, stop)[first:])


def scatter(node: Acting, number: int, places: list[str]) -> None:
    """Has each chunk of a prompt in one place alone: m(emory), d(isk) or r(oot)."""
    disk, count = node.tiers.disk, len(places)
    assert disk is not None
    eventually(lambda: not node.stat("disk_refilling"))
    node.put(number, count)
    node.drain()
    assert node.get(number, count) == count
    node.put(number, count, write=WriteMode.THROUGH)
    assert all(node.in_memory(number, count)) and all(node.on_root(number, count))
    chain = node.chain(number, count)
    with node.memory.refer(chain, 0, count) as slots:
        for index in range(count):
            disk.drop(chain.addresses[index])
            if places[index] == "d":
                assert disk.add(slots.referred[index].place, slots.images(index, index + 1)[0])
            if places[index] != "r":
                root = node.root.inner if isinstance(node.root, FaultyRoot) else node.root
                assert root.remove(node.name(number, index))
        for index in reversed(range(count)):
            if places[index] != "m":
                node.memory._inventory.drop(slots.referred[index])
    node.node.forget()
    assert node.in_memory(number, count) == [place == "m" for place in places]
    assert node.on_disk(number, count) == [place == "d" for place in places]
    assert node.on_root(number, count) == [place == "r" for place in places]


def restore(node: Acting, number: int, chunks: int) -> None:
    """Has another node put a prompt on the root."""
    root = node.root.inner if isinstance(node.root, FaultyRoot) else PosixRoot(node.root.url.removeprefix("file://"))
    other = Acting(root)
    other.put(number, chunks, write=WriteMode.UNCACHED)
    other.close()


def press(node: Acting, first: int = 10) -> None:
    """Puts and reads so much that all goes that may go."""
    for number in range(first, first + 5):
        node.put(number, 20)
        node.drain()
        node.get(number, 20)


def damage_on_disk(node: Acting, number: int, index: int) -> None:
    disk = node.tiers.disk
    assert disk is not None
    address = node.chain(number, index + 1).addresses[index]
    (path,) = Path(disk._folder.path).rglob(f"{address.hex()}*")
    flip(path, 9_000)


def read(node: Acting, number: int, chunks: int, way: str) -> int:
    """Returns the number of leading chunks that one way of reading returns; all of them compared."""
    tokens, kv, size = node.prompts.tokens(number, chunks), node.prompts.kv(number, chunks), node.size
    if way == "get":
        return node.get(number, chunks)
    with node.cache.hold(tokens) as hold:
        if way == "view":
            views = hold.view()
            assert all(same(view, kv[:, :, at * size : (at + 1) * size]) for at, view in enumerate(views))
            return len(views)
        if way == "read_into":
            out = np.empty(node.cache.layout.shape(hold.tokens), node.cache.layout.numpy_dtype)
            count = hold.read_into(out)
            assert same(out[:, :, :count], kv[:, :, :count])
            return count // size
        valid = hold.tokens
        try:
            for layer, k, v in hold.layers():
                assert same(k[:valid], kv[layer, 0, :valid]) and same(v[:valid], kv[layer, 1, :valid])
        except HoldBroken as broken:
            valid = broken.tokens_valid
        return valid // size
