"""Prompts go where their prefix is, and no worker gets much more than the others."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from benchmarks.spreading import by_first_chunk, marks_of_blocks
from kvstore import Layout
from kvstore.client.routing import Spreading, depths, marks_of
from kvstore.core.namespace import Namespace

WORKERS = [f"10.0.0.{at}:8100" for at in range(5)]
LAYOUT = Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=4)


def chat(number: int, turns: int, system: int = 8) -> list[int]:
    """A chat that begins with a system prompt of so many blocks."""
    return [*range(system), *range(1_000 * (number + 1), 1_000 * (number + 1) + 4 * turns)]


def test_a_prefix_has_the_marks_with_which_a_longer_prompt_begins() -> None:
    namespace, tokens = Namespace("m", LAYOUT), np.arange(1_000, dtype=np.uint32)
    whole = marks_of(namespace, tokens)
    assert len(whole) == len(depths(250)) < 60
    for count in (1, 3, 5, 100):
        part = marks_of(namespace, tokens[: 4 * count + 3])
        assert len(part) == len(depths(count)) and part == whole[: len(part)]
    assert marks_of(namespace, tokens[:3]) == []
    assert not set(marks_of(Namespace("another", LAYOUT), tokens)) & set(whole)
    other = tokens.copy()
    other[7] += 1
    assert marks_of(namespace, other)[:1] == whole[:1] and not set(marks_of(namespace, other)[1:]) & set(whole)


def test_the_next_turn_of_a_chat_goes_where_the_last_one_was() -> None:
    choices = Spreading()
    at = {number: choices.chosen(marks_of_blocks(chat(number, 3)), WORKERS) for number in range(40)}
    assert len(set(at.values())) == len(WORKERS)
    later = {number: choices.chosen(marks_of_blocks(chat(number, 4)), WORKERS) for number in range(40)}
    assert sum(at[number] == later[number] for number in at) >= 36


def test_a_rare_prompt_goes_to_one_worker_whichever_client_sends_it() -> None:
    clients = [Spreading() for _ in range(6)]
    for number in range(30):
        prompt = [100 * number + at for at in range(10)]
        assert len({each.chosen(marks_of_blocks(prompt), WORKERS) for each in clients}) == 1


def test_a_system_prompt_that_all_share_is_spread() -> None:
    choices, calls = Spreading(), Counter[str]()
    for number in range(2_000):
        calls[choices.chosen(marks_of_blocks(chat(number, 2)), WORKERS)] += 1
    assert max(calls.values()) <= 1.25 * 2_000 / len(WORKERS)
    assert by_first_chunk(marks_of_blocks(chat(1, 2)), WORKERS) == by_first_chunk(marks_of_blocks(chat(2, 2)), WORKERS)


def test_a_worker_that_joins_or_leaves_moves_few_prompts() -> None:
    choices, prompts = Spreading(), [chat(number, 3, system=0) for number in range(500)]

    def sent(workers: list[str]) -> list[str]:
        order = list(enumerate(prompts))
        random.Random(7).shuffle(order)
        found = {number: choices.chosen(marks_of_blocks(prompt), workers) for number, prompt in order}
        return [found[number] for number in range(len(prompts))]

    before = sent(WORKERS)
    fewer = sent(WORKERS[:-1])
    assert sum(a != b for a, b in zip(before, fewer, strict=True)) <= 1.3 * before.count(WORKERS[-1])
    again = sent(WORKERS)
    assert sum(a != b for a, b in zip(fewer, again, strict=True)) <= 0.3 * len(prompts)
