"""The moment at which a put is acknowledged, and what is where by then (MEMORY.md, "Writing", W1, W2 and W5)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.buffers import planes_of
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.recency import Hints
from kvstore.core.write_mode import Durability, WriteMode
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.root.interface import Root
from kvstore.tiers.stack import MemoryPut
from tests.kit.faulty_root import ENOSPC, EROFS, FaultyRoot, Rule
from tests.kit.patience import PATIENCE_S, returns, slowness
from tests.kit.stores import kv_of
from tests.kit.tiers import QUEUE_CHUNKS, Acting, eventually, faulty, held, on_posix, quick


@pytest.fixture(params=["memory", "posix"])
def plain(request: pytest.FixtureRequest, tmp_root: Path) -> Root:
    """Opens a root without a wrapper, so that native code is used if there is any."""
    return on_posix(tmp_root / "root") if request.param == "posix" else faulty().inner


def test_behind_is_acknowledged_when_memory_has_it(node: Acting, root: FaultyRoot) -> None:
    with held(root):
        result = node.put(1, 4)
        assert result.tokens_present == 4 * node.size and result.chunks_written == 4
        assert node.in_memory(1, 4) == [True] * 4 and node.on_root(1, 4) == [False] * 4
        assert node.stat("memory_dirty_bytes") == node.stat("behind_bytes") > 0
        assert node.get(1, 4) == node.match(1, 4) == 4
    node.drain()
    assert node.on_root(1, 4) == [True] * 4 and node.stat("behind_written") == 4
    node.assert_settled()


@pytest.mark.parametrize("write", [WriteMode.THROUGH, WriteMode.UNCACHED])
def test_put_through_returns_once_the_root_has_its_chunks(plain: Root, write: WriteMode) -> None:
    with Acting(plain, write=write) as node:
        assert node.put(1, 4).chunks_written == 4
        assert node.on_root(1, 4) == [True] * 4
        assert node.in_memory(1, 4) == [write is WriteMode.THROUGH] * 4
        assert node.put(2, 3, write=WriteMode.BEHIND).chunks_written == 3
        assert node.in_memory(2, 3) == [True] * 3
        assert node.get(1, 4) == 4 and node.get(2, 3) == 3
        node.drain()
        assert node.on_root(2, 3) == [True] * 3
        node.assert_settled()


@pytest.mark.parametrize("durability", [Durability.EVERYSEC, Durability.FSYNC])
def test_durable_puts_are_never_behind(plain: Root, durability: Durability) -> None:
    with Acting(plain, durability=durability) as node:
        node.put(1, 3)
        node.put(1, 4, write=WriteMode.BEHIND)
        assert node.on_root(1, 4) == node.in_memory(1, 4) == [True] * 4 and node.stat("behind_written") == 0
        assert node.cache.blocks.put([b"k" * 16], [b"v" * 5_000]) == [True]
        assert node.stat("behind_bytes") == node.stat("memory_dirty_bytes") == 0


def test_put_behind_full_queue_waits_for_room(root: FaultyRoot) -> None:
    limits = quick(write_deadline_s=PATIENCE_S, behind_wait_s=PATIENCE_S, behind_give_up_s=PATIENCE_S)
    with Acting(root, limits=limits) as node, ThreadPoolExecutor(1) as threads:
        with held(root):
            node.put(1, QUEUE_CHUNKS - 4)
            waiting = threads.submit(node.put, 2, 10)
            eventually(lambda: node.in_memory(2, 4) == [True] * 4, "there is no room for more")
        result = waiting.result(PATIENCE_S)
        assert (result.tokens_present, result.chunks_written, result.reason) == (10 * node.size, 10, "")
        assert node.stat("behind_shed") == 0
        node.drain()
        assert all(node.on_root(2, 10))


def test_put_behind_sheds_chunks_that_find_no_room(node: Acting, root: FaultyRoot) -> None:
    with held(root):
        assert node.put(1, QUEUE_CHUNKS - 4).chunks_written == QUEUE_CHUNKS - 4
        result = returns(lambda: node.put(2, 10))
        assert (result.tokens_present, result.chunks_written, result.reason) == (4 * node.size, 4, "overload")
        assert node.stat("behind_shed") == 6
        assert node.put(3, 2).tokens_present == 0
        assert node.put(2, 10, first=5).tokens_present == 4 * node.size, "its parent was shed"
        assert node.stat("behind_bytes") <= node.memory.size_bytes // 2
        assert node.get(2, 10) == 4 and node.get(1, QUEUE_CHUNKS) == QUEUE_CHUNKS - 4
        # A chunk that memory already has takes no room of the queue.
        assert node.put(2, 4).tokens_present == 4 * node.size
    node.drain()
    assert node.on_root(2, 10) == [True] * 4 + [False] * 6
    assert node.put(2, 10).tokens_present == 10 * node.size
    node.drain()
    assert all(node.on_root(2, 10))
    node.assert_settled()


def test_put_behind_takes_nothing_behind_a_chunk_that_another_put_is_bringing(node: Acting, root: FaultyRoot) -> None:
    with held(root):
        node.put(1, QUEUE_CHUNKS - 4)
        chain, sections = node.chain(2, 10), planes_of(node.prompts.kv(2, 10), node.cache.layout)
        slot = node.memory.claim(chain, 1)
        assert slot is not None
        put = MemoryPut(chain, 0, 10, sections, Hints(), Deadline(SystemClock(), PATIENCE_S))
        kept = node.tiers.absorb(put, waits=True)
        assert (kept.there, kept.fresh) == ([True] + [False] * 9, [0])
        node.memory.drop([slot])


def test_w2_parents_are_written_first(node: Acting, root: FaultyRoot) -> None:
    published: list[int] = []
    order = {node.name(1, index): index for index in range(12)}

    def note(name: object) -> bool:
        if name in order:
            published.append(order[name])  # type: ignore[index]
        return False

    root.set_rules([Rule("publish", EROFS, note)])
    # Turns of one conversation, queued one after the other.
    for first, stop in ((0, 3), (3, 5), (0, 9), (9, 12)):
        node.put(1, stop, first)
    node.drain()
    assert published == sorted(published) and set(published) == set(range(12))
    assert all(node.on_root(1, 12))


def test_w2_what_lost_its_parent_for_good_is_dropped_and_counted(root: FaultyRoot) -> None:
    with Acting(root, limits=quick(behind_give_up_s=0.6, write_deadline_s=5.0, stall_s=5.0)) as node:
        node.put(1, 4, write=WriteMode.UNCACHED)
        node.lose(1, 4)
        assert node.put(1, 6, first=4).tokens_present == 0, "it looks, and finds no parent"
        node.put(1, 4, write=WriteMode.UNCACHED)
        with held(root, "stat"):  # before it is looked whether the parents are there
            assert node.put(1, 6, first=4).tokens_present == 6 * node.size
            for index in range(4):
                root.inner.remove(node.name(1, index))
        node.drain()
        assert node.stat("behind_lost") == 2 and not any(node.on_root(1, 6))
        node.assert_settled()


@pytest.mark.parametrize("write", list(WriteMode))
def test_w5_parents_that_only_memory_has_are_written_first(node: Acting, write: WriteMode) -> None:
    node.put(1, 5)
    node.drain()
    node.lose(1, 5)
    assert node.get(1, 5) == 5, "memory has them"
    result = node.put(1, 8, first=5, write=write)
    assert result.tokens_present == 8 * node.size
    node.drain()
    assert node.on_root(1, 8) == [True] * 8
    assert node.get(1, 8) == 8
    node.assert_settled()


@pytest.mark.parametrize("write", list(WriteMode))
def test_w5_a_parent_that_is_damaged_in_memory_and_lost_on_the_root_ends_the_put(
    root: FaultyRoot, write: WriteMode
) -> None:
    with Acting(root, limits=quick(behind_give_up_s=0.3 * slowness())) as node:
        damaged_parent(node, root, write)


def damaged_parent(node: Acting, root: FaultyRoot, write: WriteMode) -> None:
    node.put(1, 5)
    node.drain()
    node.lose(1, 5, first=2)
    node.damage(1, 3)
    result = node.put(1, 8, first=5, write=write)
    if write is not WriteMode.BEHIND:
        assert result.tokens_present == 2 * node.size
    eventually(lambda: not node.stat("behind_bytes"))
    assert node.on_root(1, 8) == [True] * 2 + [False] * 6 and staged(root) == []
    assert node.get(1, 8) == 3 and node.stat("memory_damaged") == 1
    node.assert_settled()


@pytest.mark.parametrize("fault", [ENOSPC, EROFS], ids=["full", "denied"])
def test_a_root_that_takes_nothing_loses_what_is_behind_and_memory_serves_it(root: FaultyRoot, fault: object) -> None:
    with Acting(root, limits=quick(behind_give_up_s=1.2)) as node:
        root.set_rules([Rule("stage", fault)])  # type: ignore[arg-type]
        assert node.put(1, 4).tokens_present == 4 * node.size
        calls = root.calls["stage"]
        eventually(lambda: node.stat("behind_lost") == 4)
        assert root.calls["stage"] - calls < 60, "it pauses between attempts"
        assert node.get(1, 4) == 4 and node.stat("memory_dirty_bytes") == 0
        root.set_rules([])
        # A put that continues the prompt writes the lost chunks with it.
        assert node.put(1, 6, first=4).tokens_present == 6 * node.size
        node.drain()
        assert all(node.on_root(1, 6))
        node.assert_settled()


def test_what_the_root_took_before_it_was_full_stays(root: FaultyRoot) -> None:
    with Acting(root, limits=quick(behind_give_up_s=0.3 * slowness(), width=1)) as node:
        root.set_rules([Rule("publish", ENOSPC, lambda name: name in {node.name(1, 2), node.name(1, 3)})])
        node.put(1, 4)
        eventually(lambda: not node.stat("behind_bytes"))
        assert node.on_root(1, 4) == [True, True, False, False]
        assert node.stat("behind_written") + node.stat("behind_lost") == 4 and node.get(1, 4) == 4
        node.assert_settled()


@pytest.mark.parametrize("first", [0, 4], ids=["behind", "as_parents"])
def test_i1_what_goes_wrong_between_verifying_and_staging_gets_no_name(root: FaultyRoot, first: int) -> None:
    """Staging makes new checksums, so a bit that flips before it would count as right for ever."""
    with Acting(root, limits=quick(behind_give_up_s=0.3 * slowness(), width=1)) as node:
        turned: list[bool] = []
        if first:
            node.put(1, 4)
            node.drain()
            node.lose(1, 4)

        def turn(name: object) -> bool:
            """At the look before its bytes are staged: one thread comes to it in no other."""
            if name == node.name(1, 2) and node.in_memory(1, 4)[2] and not turned:
                node.damage(1, 2)
                turned.append(True)
            return False

        root.set_rules([Rule("stat", EROFS, turn)])
        node.put(1, 6, first=first)
        eventually(lambda: not node.stat("behind_bytes"))
        assert turned and node.on_root(1, 6) == [True] * 2 + [False] * 4
        with Acting(root.inner) as other:
            assert other.get(1, 6) == 2
        node.assert_settled()


@pytest.mark.parametrize("at", [200, 9_000], ids=["header", "section"])
def test_i1_what_goes_wrong_before_native_code_stages_it_gets_no_name(tmp_root: Path, at: int) -> None:
    """It compares what it writes with the image that this comes from."""
    root = on_posix(tmp_root / "root")
    longer = slowness()
    with Acting(root, limits=quick(behind_after_s=0.5 * longer, behind_give_up_s=1.0 * longer)) as node:
        node.put(2, 1)
        node.drain()  # Python makes the folder in which native code stages
        node.put(1, 6)
        node.damage(1, 2, at)
        eventually(lambda: not node.stat("behind_bytes"))
        assert node.on_root(1, 6) == [True] * 2 + [False] * 4
        assert node.stat("memory_damaged") == 1
        node.assert_settled()
    with Acting(root) as other:
        assert other.get(1, 6) == 2


def staged(root: FaultyRoot) -> list[str]:
    """Returns the staged files of a root."""
    folders = [entry.name for entry in root.inner.list("staging")]  # type: ignore[arg-type]
    return [f"{folder}/{file.name}" for folder in folders for file in root.inner.list(f"staging/{folder}")]  # type: ignore[arg-type]


def test_w2_a_prompt_that_cannot_be_written_holds_no_other_up(root: FaultyRoot) -> None:
    """Prompts with the same beginning: only what continues a chunk that waits has to wait with it."""
    with Acting(root) as node:
        size = node.size
        tokens = [np.concatenate((node.prompts.tokens(1, 2), node.prompts.tokens(number, 4))) for number in (2, 3)]
        node.put(1, 2)
        node.drain()
        kvs = [kv_of(node.cache.layout, each) for each in tokens]
        chains = [ChunkKeys.of(node.cache.namespace, each.astype(np.uint32)) for each in tokens]
        stuck = places.chunk(chains[0].addresses[3], node.cache.namespace.id, node.identity.shard_bits)
        root.set_rules([Rule("publish", ENOSPC, lambda name: name == stuck)])
        node.cache.put(tokens[0], kvs[0])
        node.cache.put(tokens[1][: 4 * size], kvs[1][:, :, : 4 * size])
        node.cache.put(tokens[1], kvs[1])
        names = [places.chunk(each, node.cache.namespace.id, node.identity.shard_bits) for each in chains[1].addresses]
        eventually(lambda: all(root.inner.stat(name) for name in names))
        assert node.stat("memory_dirty_bytes") > 0 and root.inner.stat(stuck) is None
        root.set_rules([])
        node.drain()
        assert root.inner.stat(stuck) is not None
        node.assert_settled()
