"""A write, run by run: who owns the memory of a run, what each mode leaves where, and the answer."""

from __future__ import annotations

import gc
import threading
from functools import partial

import numpy as np
import pytest

from kvstore.core.buffers import BlockBuffers, Planes
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.recency import DEFAULT
from kvstore.core.write_mode import RUNS_MAX, WriteMode
from kvstore.engine.writer import WriteBatch
from kvstore.format import places
from kvstore.format.keyset import BlockKeys
from tests.kit.faulty_root import EIO, Delay, Rule
from tests.kit.memory_tiers import empty
from tests.kit.patience import NEVER_S, returns
from tests.kit.tiers import ASKING, LARGE, Acting, eventually, faulty, held, together


def soon() -> Deadline:
    return Deadline(SystemClock(), NEVER_S)


def begin(node: Acting, number: int, chunks: int, mode: WriteMode) -> WriteBatch:
    return node.node.writer.begin(node.chain(number, chunks), 0, soon(), DEFAULT, mode)


def buffer_of(node: Acting, number: int, chunk: int) -> tuple[np.ndarray, Planes]:
    """Returns one chunk in separate memory, as bytes from a network arrive."""
    array = node.prompts.kv(number, chunk + 1, chunk).copy()
    return array, Planes(array.reshape(LARGE.layers, 2, -1).view(np.uint8), LARGE.section_bytes, chunk)


@pytest.mark.parametrize("mode", [WriteMode.UNCACHED, WriteMode.THROUGH])
def test_a_run_keeps_its_memory_until_it_is_on_the_root_and_gives_it_back_in_order(mode: WriteMode) -> None:
    """Freed memory is overwritten at once."""
    root, given_back = faulty(), list[int]()
    with Acting(root) as node:
        write = begin(node, 1, 6, mode)

        def add(chunk: int) -> None:
            array, source = buffer_of(node, 1, chunk)

            def release() -> None:
                array[:] = 0
                given_back.append(chunk)

            write.add(source, chunk, 1, soon(), release)

        with held(root):
            for chunk in range(RUNS_MAX):
                add(chunk)
            third = threading.Thread(target=add, args=(RUNS_MAX,))
            third.start()
            third.join(0.2)
            assert given_back == [] and third.is_alive(), "the root has none of them yet"
        third.join(NEVER_S)
        for chunk in range(RUNS_MAX + 1, 6):
            add(chunk)
        assert write.commit(soon()).there.all()
        assert given_back == [*range(6)]
        assert node.get(1, 6) == 6 and node.on_root(1, 6) == [True] * 6
        assert node.in_memory(1, 6) == [True] * 6 or mode is WriteMode.UNCACHED


def test_a_run_of_which_all_is_there_waits_for_its_turn() -> None:
    """Runs are given back in order, also one that nothing has to be stored of."""
    root, given_back = faulty(), list[int]()
    with Acting(root) as node:
        keys, blocks = [bytes([at]) * 16 for at in range(2)], [memoryview(bytes([at]) * 300_000) for at in range(2)]
        wanted = BlockKeys.of(node.cache.namespace, keys, [300_000] * 2)
        node.node.put_blocks(node.cache.namespace, keys[1:], blocks[1:])
        slot = node.memory.claim(wanted, 0)
        assert slot is not None, "another put is bringing the first: ours goes to the root"
        write = node.node.writer.begin(wanted, 0, soon())
        with held(root):
            for at in range(2):
                source = BlockBuffers([blocks[at]], at)
                write.add(source, at, 1, soon(), partial(given_back.append, at))
            assert given_back == []
        assert write.commit(soon()).there.all() and given_back == [0, 1]
        node.memory.drop([slot])


def test_w1_what_the_root_refuses_of_a_put_behind_takes_nothing_from_what_memory_took() -> None:
    root = faulty()
    with Acting(root) as node:
        slot = node.memory.claim(node.chain(1, 6), 4)
        assert slot is not None, "another put is bringing the fifth chunk"
        root.set_rules([Rule("stage", EIO)])
        write, given_back = begin(node, 1, 6, WriteMode.BEHIND), list[int]()
        for chunk in range(6):
            write.add(buffer_of(node, 1, chunk)[1], chunk, 1, soon(), partial(given_back.append, chunk))
        assert write.commit(soon()).there.tolist() == [True] * 4 + [False] * 2
        assert given_back == [*range(6)], "whoever sends the next run waits for the memory of those before it"
        node.memory.drop([slot])
        root.set_rules([])


def test_what_a_thread_that_hangs_reads_is_never_given_back_by_the_put_that_gave_up() -> None:
    root, late = faulty(), Deadline(SystemClock(), 0.0)
    with Acting(root) as node:
        slot = node.memory.claim(node.chain(1, 9), 2)
        assert slot is not None, "another put is bringing the third chunk: it and those behind it go to the root"
        write, given_back = begin(node, 1, 9, WriteMode.BEHIND), list[int]()
        with held(root):
            for chunk in range(9):
                deadline = soon() if chunk < 1 + RUNS_MAX else late  # the parents are a run too
                write.add(buffer_of(node, 1, chunk)[1], chunk, 1, deadline, partial(given_back.append, chunk))
                if chunk == 2:
                    assert write._root is not None
                    parents, _ = write._root._pending[0]
                    eventually(lambda: parents._next, "a thread has begun")  # noqa: B023
            assert write.commit(soon()).there.tolist() == [True] * 2 + [False] * 7
            write.abort()
            assert write._root is not None and write._root._room is not None
            assert write.is_read and given_back == [0, 1] and write._root._room.size_bytes
        node.memory.drop([slot])


@pytest.mark.parametrize("mode", [WriteMode.BEHIND, WriteMode.THROUGH, WriteMode.UNCACHED])
def test_the_first_block_under_a_key_stays_whatever_its_size(mode: WriteMode) -> None:
    keys, large, small = [bytes([at]) * 16 for at in range(2)], memoryview(bytes(3_000)), memoryview(bytes(500))
    with Acting(faulty()) as node:
        space = node.cache.namespace
        written = node.node.put_blocks(space, [keys[0], keys[1], keys[0]], [large, small, small], write=mode)
        assert written.there.tolist() == written.fresh.tolist() == [True, True, False]
        assert not node.node.put_blocks(space, keys[:1], [small], write=mode).there.any()
        node.drain()
        node.assert_settled()
        assert node.cache.blocks.get(keys[:1], [bytearray(3_000)]) == [True]
        assert node.cache.blocks.get(keys[:1], [bytearray(500)]) == [False]


@pytest.mark.parametrize("mode", [WriteMode.BEHIND, WriteMode.THROUGH, WriteMode.UNCACHED])
def test_the_first_block_stays_although_it_reaches_the_root_last(mode: WriteMode) -> None:
    """Threads write blocks of one put in any order."""
    root, keys, sizes = faulty(), [b"1" * 16, b"2" * 16, b"1" * 16], (3_000, 500, 500)
    with Acting(root) as node:
        root.set_rules([Rule("stage", Delay(0.2), nth=1)])
        put = partial(node.node.put_blocks, node.cache.namespace, write=mode)
        written = put(keys, [memoryview(bytes(size)) for size in sizes])
        assert written.there.tolist() == written.fresh.tolist() == [True, True, False]
        node.drain()
        node.assert_settled()
        assert node.cache.blocks.get(keys[:2], [bytearray(size) for size in sizes[:2]]) == [True, True]


def test_w2_a_block_that_the_root_has_with_another_size_holds_up_none_of_the_others() -> None:
    root = faulty()
    with Acting(root) as node:
        space, keys = node.cache.namespace, [bytes([at]) * 16 for at in range(5)]
        node.node.put_blocks(space, keys[2:3], [memoryview(bytes(3_000))], write=WriteMode.UNCACHED)
        node.node.forget()
        written = node.node.put_blocks(space, keys, [memoryview(bytes(500))] * 5, write=WriteMode.BEHIND)
        assert written.there.all()
        node.drain()
        node.assert_settled()
        assert (node.stat("behind_written"), node.stat("behind_lost")) == (4, 1)
        found = node.cache.blocks.get(keys, [bytearray(500) for _ in keys])
        assert found == [True, True, False, True, True]


def test_w5_what_memory_has_need_not_be_sent_again_and_nothing_stays_staged() -> None:
    """A put around of chunks still queued behind: its parents come from memory."""
    root = faulty()
    with Acting(root) as node:
        with held(root):
            node.put(1, 6, write=WriteMode.BEHIND)
            chain = node.chain(1, 8)
            begun = list[WriteBatch]()
            beginning = threading.Thread(
                target=lambda: begun.append(
                    node.node.writer.begin(chain, 0, soon(), DEFAULT, WriteMode.UNCACHED, skips=True)
                )
            )
            beginning.start()
            beginning.join(0.5)
        beginning.join(NEVER_S)
        (write,) = begun
        assert write.first == 6
        for chunk in (6, 7):
            write.add(buffer_of(node, 1, chunk)[1], chunk, 1, soon())
        assert write.commit(soon()).there.all()
        node.drain()
        assert node.on_root(1, 8) == [True] * 8
        folders = [entry.name for entry in root.inner.list(places.STAGING)]
        assert [
            file.name for folder in folders for file in root.inner.list(places.Name(f"{places.STAGING}/{folder}"))
        ] == []


@pytest.mark.parametrize("chunks", [1, 12])
def test_a_damaged_chunk_in_memory_does_not_make_a_caller_wait_for_a_root_that_hangs(chunks: int) -> None:
    """All of a prompt is in memory, so that the calling thread copies too: never from the root."""
    root = faulty()
    with Acting(root) as node:
        node.put(1, chunks)
        node.drain()
        node.node.forget()
        for index in range(chunks):
            node.damage(1, index)
        tokens = node.prompts.tokens(1, chunks)
        with held(root, *ASKING):
            assert returns(lambda: node.cache.get(tokens)[0]) == 0
        eventually(lambda: node.get(1, chunks) == chunks)
        node.assert_settled()


def test_what_was_not_verified_in_time_is_not_part_of_a_view() -> None:
    """Past its deadline the calling thread does not verify the rest itself."""
    with Acting(faulty()) as node:
        node.put(1, 24)
        node.drain()
        hold = node.node.hold(node.chain(1, 24))
        assert len(node.node.view(hold)) == 24
        # Threads may verify some before this thread looks at the clock: then again.
        eventually(lambda: node.node.view(hold, deadline_s=0.0) == [])
        node.node.holds.release(hold)
        gc.collect()
        node.assert_settled()


def test_a_block_that_went_wrong_before_it_was_written_is_lost_and_dropped() -> None:
    """I1 and W2: it is counted as lost, not as written."""
    root = faulty()
    with Acting(root) as node:
        keys = [bytes([number]) * 16 for number in (1, 2)]
        with held(root) as hang:
            for number in range(4):  # as many as there are writers: the blocks wait
                node.put(number + 1, 1)
            eventually(hang.reached.is_set)
            assert node.cache.blocks.put(keys, [bytes([7]) * 300_000, bytes([8]) * 300_000]) == [True, True]
            wanted = BlockKeys.of(node.cache.namespace, keys, [300_000, 300_000])
            with node.memory.refer(wanted, 0, 2) as slots:
                node.memory.arena.memory[slots.referred[0].offset + 9_000] ^= 1
        node.drain()
        assert node.stat("behind_written") == 4 + 1
        assert node.stat("behind_lost") == 1 and node.stat("memory_damaged") == 1
        node.assert_settled()


def test_w1_puts_of_one_prompt_at_the_same_moment_are_all_stored() -> None:
    """A chunk that somebody else is bringing is no lack of room: nothing behind it is shed."""
    with Acting(faulty()) as node:
        for number in range(4):
            present: list[int] = []

            def put(chunks: int, number: int = number, present: list[int] = present) -> None:
                present.append(node.put(number, chunks).tokens_present)

            puts = [partial(put, chunks) for chunks in (20, 24)]
            together(*puts, *puts)
            assert sorted(present) == [20 * node.size] * 2 + [24 * node.size] * 2
            node.drain()
            assert node.get(number, 24) == 24 and all(node.on_root(number, 24))
            empty(node.memory, node.cache.namespace)
        node.assert_settled()
