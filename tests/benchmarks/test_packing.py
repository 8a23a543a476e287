"""Steps of an engine: everything is done once, in order, and no step or memory overflows."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.packing import Step, pack
from kvstore.planning import Plan, Prompts, make_plan

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=12)


def plan_of(prompts: list[list[int]], decode: list[int]) -> Plan:
    return make_plan(Prompts.of_tokens(prompts), memory_tokens=99, decode_tokens=decode)


@given(PROMPTS, st.data(), st.integers(1, 9), st.integers(1, 60))
def test_steps_run_everything_once_and_in_order(
    prompts: list[list[int]], data: st.DataObject, step_tokens: int, memory: int
) -> None:
    count = len(prompts)
    decode = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    plan = plan_of(prompts, decode)
    steps = list(pack(plan, decode, step_tokens=step_tokens, memory_tokens=memory))
    computed = {
        index: tokens
        for group in plan.groups
        for index, tokens in zip(group.members, group.computed, strict=True)
        if tokens
    }
    found = Counter[int]()
    for step in steps:
        assert 0 < step.tokens <= step_tokens
        found.update(dict(step.prefill))
    assert found == computed
    begun = list(dict.fromkeys(index for step in steps for index, _ in step.prefill))
    assert begun == [index for index in plan.order if computed.get(index)]
    assert sum(step.decoding for step in steps) == sum(decode)
    assert memory_of(steps, computed, decode) <= max(memory, *computed_and_put_out(computed, decode), 0)


def computed_and_put_out(computed: dict[int, int], decode: list[int]) -> list[int]:
    return [computed.get(index, 0) + output for index, output in enumerate(decode)] or [0]


def memory_of(steps: list[Step], computed: dict[int, int], decode: list[int]) -> int:
    """The most memory that prompts which compute something have at once."""
    most, ends = 0, dict[int, int]()
    left = dict(computed)
    for now, step in enumerate(steps):
        ends = {index: end for index, end in ends.items() if end > now}
        for index, tokens in step.prefill:
            left[index] -= tokens
            ends[index] = 10**9 if left[index] else now + 1 + decode[index]
        most = max(most, sum(computed[index] + decode[index] for index in ends))
    return most


def test_prefill_fills_what_decoding_leaves() -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8]]
    steps = list(pack(plan_of(prompts, [2, 2, 2]), 2, step_tokens=4, memory_tokens=99))
    # By output for each token to compute: the third, the first, the second.
    assert steps == [
        Step(((2, 1), (0, 3)), 0),
        Step(((1, 2),), 2),
        Step(((1, 2),), 2),
        Step((), 1),
        Step((), 1),
    ]


def test_a_prompt_waits_for_memory_and_a_large_one_runs_alone() -> None:
    plan = plan_of([[1] * 4, [2] * 4, [3] * 30], [3, 3, 0])
    steps = list(pack(plan, [3, 3, 0], step_tokens=50, memory_tokens=10))
    begun = [(now, index) for now, step in enumerate(steps) for index, _ in step.prefill]
    assert begun == [(0, 0), (4, 1), (8, 2)]
