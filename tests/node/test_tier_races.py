"""Tiers while others use them: reads beside changes, and the remains of an interrupted call."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from kvstore.format.keyset import BlockKeys
from tests.kit.memory_tiers import empty
from tests.kit.tiers import ASKING, IN_TIME_S, Acting, eventually, faulty, held, timed, together


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
            counts: list[int] = []
            assert timed(lambda: counts.append(node.cache.get(tokens)[0] // node.size)) < IN_TIME_S
            assert counts == [0]
        eventually(lambda: node.get(1, chunks) == chunks)
        node.assert_settled()


def test_what_was_not_verified_in_time_is_not_part_of_a_view() -> None:
    """Past its deadline the calling thread does not verify the rest itself."""
    with Acting(faulty()) as node:
        node.put(1, 24)
        node.drain()
        hold = node.node.hold(node.chain(1, 24))
        assert len(node.node.view(hold)) == 24
        # Lanes may verify some before this thread looks at the clock: then again.
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


def test_w1_a_put_of_what_another_brings_says_what_memory_took_where_the_root_hangs() -> None:
    root = faulty()
    with Acting(root) as node:
        slot = node.memory.claim(node.chain(1, 6), 4)
        assert slot is not None
        with held(root, *ASKING):
            present: list[int] = []
            assert timed(lambda: present.append(node.put(1, 6).tokens_present)) < IN_TIME_S
            assert present == [4 * node.size]
        node.memory.drop([slot])
        node.drain()
        assert node.on_root(1, 6) == [True] * 4 + [False] * 2
        node.assert_settled()
