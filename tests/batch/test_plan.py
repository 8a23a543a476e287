"""Plans equal those found by trying everything, with and without a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.batch import Plan, PromptSet, Storage, make_plan
from kvstore.errors import InvalidRequest
from tests.batch.brute import Batch
from tests.kit.cases import for_each

PROMPT = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=8)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A few prompts of two tokens, and a store that was given some of their prefixes."""
    prompts = draw(st.lists(PROMPT, max_size=6))
    known = [each[: draw(st.integers(0, 8))] for each in prompts if draw(st.booleans())]
    chunk = draw(st.sampled_from([1, 2]))
    return Batch(prompts, known, chunk * draw(st.sampled_from([1, 2])), chunk)


def planned(batch: Batch, memory: int = 100) -> Plan:
    class Filled(Storage):
        def stored(self, wanted: list[tuple[int, int]]) -> list[int]:
            return [min(chunks, batch.stored(batch.prompts[index]) // batch.chunk) for index, chunks in wanted]

    prompts = PromptSet.of_tokens(batch.prompts, batch.block)
    return make_plan(prompts, memory_tokens=memory, chunk_tokens=batch.chunk, storage=Filled())


@given(batches(), st.integers(0, 20))
def test_a_plan_equals_the_one_found_by_trying_everything(batch: Batch, memory: int) -> None:
    count = len(batch.prompts)
    plan = planned(batch, memory)
    assert sorted(plan.order) == list(range(count))
    assert plan.tokens_total == sum(map(len, batch.prompts))
    assert plan.tokens_stored == sum(map(batch.stored, batch.prompts))
    assert plan.tokens_optimum == batch.optimum()
    assert plan.tokens_one_level == batch.one_level()
    assert plan.tokens_arrival == batch.in_order(range(count), memory)
    assert plan.tokens_to_compute == batch.in_order(plan.order, memory)
    assert plan.tokens_to_compute == sum(group.tokens_to_compute for group in plan.groups)


@given(batches())
def test_the_order_is_the_optimum_if_memory_holds_each_prompt(batch: Batch) -> None:
    longest = max(map(len, batch.prompts), default=0)
    plan = planned(batch, longest)
    assert plan.tokens_to_compute == plan.tokens_optimum


@given(batches())
def test_members_share_their_prefix_and_the_store_holds_what_is_said(batch: Batch) -> None:
    for group in planned(batch).groups:
        prefixes = {tuple(batch.prompts[index][: group.prefix_tokens]) for index in group.members}
        assert len(prefixes) == 1 and len(prefixes.pop()) == group.prefix_tokens
        assert group.prefix_tokens or len(group.members) == 1
        stored = tuple(batch.stored(batch.prompts[index]) for index in group.members)
        assert group.stored == stored
        assert group.stored_tokens == min(group.prefix_tokens, stored[0])


def test_a_group_stays_together_around_the_groups_inside_of_it() -> None:
    prompts = [[1, 1, at] for at in range(3)] + [[1, 1, 9, 9, 9, 9, at] for at in range(3)] + [[1, 1, 20]]
    plan = planned(Batch(prompts, []))
    assert [group.prefix_tokens for group in plan.groups] == [2, 6]
    assert plan.groups[0].members == (0, 1, 2, 6)


@for_each(
    "prompts, said",
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], "text"], "prompt 1: tokens are a str"),
        ([[1, -1]], "prompt 0: tokens are not a flat sequence .*: item 1 is -1"),
        ([[1], [1, True, 3]], "prompt 1: the tokens have a boolean among them"),
        ([[1], [0.5]], "prompt 1: tokens are not a flat sequence .*: item 0 is 0.5"),
    ],
)
def test_a_prompt_that_is_wrong_is_named(prompts: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        PromptSet.of_tokens(prompts)


@for_each("wrong, said", [({"memory_tokens": -1}, "memory_tokens=-1"), ({"memory_tokens": 2.5}, "memory_tokens=2.5")])
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        make_plan(PromptSet.of_tokens([[1], np.array([2])]), **wrong)
