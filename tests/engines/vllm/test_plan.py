"""A batch larger than the engine's KV cache, in arrival order and in planned order, with and without the store.

The plan promises the tokens that an engine computes that runs one request after another. Times are printed only.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvstore.planning import Plan, Prompts, make_plan
from tests.engines.vllm.engines import BLOCK_TOKENS, Answer, prompt, running_engine

DOCUMENTS, QUESTIONS, DOCUMENT_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 8, 5, 480, 40, 4
BLOCKS = 48
"""The engine's KV cache: of eight documents it holds less than three."""
MEMORY_TOKENS = (BLOCKS - 1 - -(-(QUESTION_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS)) * BLOCK_TOKENS
"""Without vLLM's null block and the blocks of the running request's own tokens."""
SEQUENTIAL = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 1}
PROMISE, LEAST_SAVED = 0.02, 0.2


def batch() -> list[list[int]]:
    """Questions about documents, in no order."""
    documents = [prompt(1000 + number, DOCUMENT_TOKENS) for number in range(DOCUMENTS)]
    found = [
        document + prompt(2000 + number * QUESTIONS + question, QUESTION_TOKENS)
        for number, document in enumerate(documents)
        for question in range(QUESTIONS)
    ]
    random.Random(5).shuffle(found)
    return found


PROMPTS = batch()
TOKENS = sum(map(len, PROMPTS))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Prompts.of_tokens(PROMPTS, BLOCK_TOKENS), memory_tokens=MEMORY_TOKENS)


@pytest.fixture(scope="module")
def arrival(workplace: Path, model: Path) -> Answer:
    """The batch as it came, without a store."""
    with running_engine(workplace, {"model": str(model), **SEQUENTIAL}) as engine:
        return engine.generate(*PROMPTS, tokens=OUTPUT_TOKENS)


def computed(answer: Answer) -> int:
    """Prompt tokens that the engine computed."""
    return TOKENS - sum(answer.cached)


def in_arrival_order(answer: Answer, order: list[int]) -> Answer:
    """The answers to prompts that ran in ``order``."""
    at = {index: position for position, index in enumerate(order)}
    picked = [at[index] for index in range(len(order))]

    def sorted_back(values: list[Any]) -> list[Any]:
        return [values[position] for position in picked]

    return Answer(
        sorted_back(answer.tokens),
        sorted_back(answer.logprobs),
        sorted_back(answer.cached),
        sorted_back(answer.reasons),
        answer.seconds,
    )


def told(name: str, answer: Answer, plan: Plan) -> None:
    print(f"{name}: computed {computed(answer):,} of {TOKENS:,} tokens (plan {plan.tokens_to_compute:,}, ", end="")
    print(f"arrival {plan.tokens_arrival:,}), {answer.seconds:.2f} s")


def test_planned_order_computes_what_the_plan_promises(
    workplace: Path, model: Path, plan: Plan, arrival: Answer
) -> None:
    order = list(plan.order)
    with running_engine(workplace, {"model": str(model), **SEQUENTIAL}) as engine:
        planned = in_arrival_order(engine.generate(*(PROMPTS[index] for index in order), tokens=OUTPUT_TOKENS), order)
    told("arrival", arrival, plan)
    told("planned", planned, plan)
    planned.check_same(arrival)
    assert computed(planned) == pytest.approx(plan.tokens_to_compute, rel=PROMISE)
    assert plan.tokens_arrival is not None
    assert computed(arrival) == pytest.approx(plan.tokens_arrival, rel=PROMISE)
    assert computed(planned) < (1 - LEAST_SAVED) * computed(arrival)
