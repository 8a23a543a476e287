"""Clear, pins and engine-hashed blocks on a node with memory (MEMORY.md, "Reading" and "Writing")."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.write_mode import WriteMode
from tests.kit.faulty_root import FaultyRoot
from tests.kit.memory_tiers import empty
from tests.kit.patience import PATIENCE_S
from tests.kit.scattering import press, to_disk
from tests.kit.tiers import QUEUE_CHUNKS, Acting, eventually, faulty, held, on_posix

BLOCK_BYTES = 300_000


@pytest.fixture
def node(root: FaultyRoot, tmp_root: Path) -> Iterator[Acting]:
    with Acting(root, disk=tmp_root / "disk") as acting:
        eventually(lambda: not acting.stat("disk_refilling"))
        yield acting


def keys(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(first, first + count)]


def blocks(count: int, first: int = 0) -> list[bytes]:
    return [bytes([number % 251 + 1]) * BLOCK_BYTES for number in range(first, first + count)]


def got(node: Acting, count: int, first: int = 0) -> list[bool]:
    """The blocks that come; their bytes compared."""
    buffers = [bytearray(BLOCK_BYTES) for _ in range(count)]
    found = node.cache.blocks.get(keys(count, first), buffers)
    for there, buffer, block in zip(found, buffers, blocks(count, first), strict=True):
        assert not there or bytes(buffer) == block, "wrong bytes"
    return found


def test_clear_drops_memory_disk_and_root(node: Acting) -> None:
    other = node.store.namespace("other", node.cache.layout)
    node.put(1, 4)
    node.put(2, 4)
    tokens, kv = node.prompts.tokens(1, 4), node.prompts.kv(1, 4)
    other.put(tokens, kv)
    node.cache.blocks.put(keys(3), blocks(3))
    node.drain()
    to_disk(node, 2, 4, first=0)
    cleared = node.cache.clear()
    assert cleared.chunks == 11
    for number in (1, 2):
        assert node.match(number, 4) == node.get(number, 4) == 0
        assert not any(node.in_memory(number, 4)) and not any(node.on_disk(number, 4))
    assert got(node, 3) == [False] * 3 and node.cache.blocks.match(keys(3)) == 0
    assert other.match(tokens) == len(tokens)
    assert node.put(1, 4).chunks_written == 4
    node.drain()
    assert node.get(1, 4) == 4
    node.assert_settled()


def test_clear_cancels_what_waits_for_the_root(node: Acting, root: FaultyRoot) -> None:
    with held(root):
        node.put(1, 4)  # being written
        for number in range(2, 7):
            node.put(number, 4)
        eventually(lambda: node.stat("behind_bytes") == 24 * node.unit_bytes)
        empty(node.memory, node.cache.namespace)
        assert node.stat("memory_dirty_bytes") == 0 and node.get(6, 4) == 0
    node.drain()
    assert not any(node.on_root(6, 4))
    node.cache.clear()
    for number in range(1, 7):
        assert not any(node.on_root(number, 4)), number
    assert node.stat("behind_bytes") == 0
    node.assert_settled()


def test_what_is_read_while_its_namespace_is_cleared_does_not_stay(node: Acting, root: FaultyRoot) -> None:
    """It is read from the root until it is deleted there, and known to be there; memory takes none of it (rule P5)."""
    node.put(1, 4)
    node.drain()
    with held(root, "list") as hang:
        clearing = threading.Thread(target=node.cache.clear)
        clearing.start()
        assert hang.reached.wait(PATIENCE_S)
        assert not any(node.in_memory(1, 4)) and node.get(1, 4) == 4 and not any(node.in_memory(1, 4))
    clearing.join(PATIENCE_S)
    assert not any(node.on_root(1, 4))
    assert node.match(1, 4) == node.get(1, 4) == 0 and not any(node.in_memory(1, 4))
    node.assert_settled()


def test_what_is_demoted_while_its_namespace_is_cleared_does_not_stay(node: Acting) -> None:
    """Memory and disk were cleared already when the demoting thread writes its last chunk."""
    node.put(1, 1)
    node.drain()
    assert node.get(1, 1) == 1
    with node.memory.refer(node.chain(1, 1), 0, 1) as slots:
        node.cache.clear()
        node.tiers.demote(slots.referred[0], slots.images(0, 1)[0])
    assert node.stat("memory_demoted") == 1 and node.on_disk(1, 1) == [False]
    assert node.stat("disk_held_bytes") == 0
    node.assert_settled()


def test_clear_under_a_view_and_a_hold(node: Acting) -> None:
    node.put(1, 4)
    node.drain()
    with node.cache.hold(node.prompts.tokens(1, 4)) as hold:
        views = hold.view()
        node.cache.clear()
        press(node)
        for index, view in enumerate(views):
            assert view.tobytes() == node.prompts.kv(1, 4)[:, :, index * node.size : (index + 1) * node.size].tobytes()
    del views, view
    gc.collect()
    node.assert_settled()


def test_a_pin_of_what_was_just_put_behind_covers_it(node: Acting) -> None:
    """Acknowledged, so it can be pinned: it is on the root when the pin is there (P1 of gc/PROTOCOL.md)."""
    assert node.put(1, 4).tokens_present == 4 * node.size
    with node.cache.pin(node.prompts.tokens(1, 4), ttl=60) as pin:
        assert pin.tokens == 4 * node.size and all(node.on_root(1, 4))
        assert node.cache.refcount(node.prompts.tokens(1, 4)) == 1
        assert node.cache.clear().chunks == 0
        assert node.get(1, 4) == 4
    assert node.cache.clear().chunks == 4


@pytest.mark.parametrize("write", list(WriteMode))
def test_blocks_by_write_mode(tmp_root: Path, write: WriteMode) -> None:
    root = faulty(on_posix(tmp_root))
    with Acting(root, write=write) as node:
        assert node.cache.blocks.put(keys(5), blocks(5)) == [True] * 5
        assert node.cache.blocks.match(keys(6)) == 5
        assert node.cache.blocks.present(keys(6)) == [True] * 5 + [False]
        assert got(node, 6) == [True] * 5 + [False]
        hits = node.stat("memory_hits")
        assert hits == (0 if write is WriteMode.UNCACHED else 5)
        node.drain()
        assert got(node, 5) == [True] * 5
        # Another size under the same key is not there, and is not taken.
        assert node.cache.blocks.put(keys(1), [b"x" * 10]) in ([True], [False])
        assert node.cache.blocks.get(keys(1), [bytearray(10)]) == [False]
        assert got(node, 1) == [True]
        node.assert_settled()


def test_blocks_behind_a_full_queue_are_shed_with_the_right_answer(node: Acting, root: FaultyRoot) -> None:
    with held(root):
        count = QUEUE_CHUNKS + 5
        stored = node.cache.blocks.put(keys(count), blocks(count))
        fits = sum(stored)
        assert stored == [True] * fits + [False] * (count - fits) and 0 < fits < count
        assert node.stat("behind_bytes") <= node.memory.size_bytes // 2
        assert node.cache.blocks.present(keys(count)) == stored and got(node, count) == stored
    node.drain()
    assert node.cache.blocks.put(keys(count), blocks(count)) == [True] * count
    node.drain()
    assert got(node, count) == [True] * count
    node.assert_settled()


def test_a_hold_of_blocks_reads_them_under_pressure(node: Acting) -> None:
    node.cache.blocks.put(keys(4), blocks(4))
    node.drain()
    with node.cache.blocks.hold(keys(5)) as hold:
        assert hold.present == [True] * 4 + [False]
        press(node)
        buffers = [bytearray(BLOCK_BYTES) for _ in range(4)]
        assert hold.get(keys(4), buffers) == [True] * 4
        assert [bytes(buffer) for buffer in buffers] == blocks(4)
    node.assert_settled()
