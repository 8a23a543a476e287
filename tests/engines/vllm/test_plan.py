"""A batch larger than the engine's KV cache, in arrival order and in planned order, with and without the store.

The plan promises the tokens that an engine computes that runs one request after another. Times are printed only.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli.app import app
from kvstore.planning import Plan, Prompts, make_plan
from tests.engines.vllm.engines import BLOCK_TOKENS, Answer, prompt, running_engine, running_server, transfer

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


@pytest.mark.parametrize("is_planned", [False, True])
def test_with_the_store_either_order_computes_no_more_than_the_plan(
    workplace: Path, tmp_root: Path, model: Path, plan: Plan, arrival: Answer, is_planned: bool
) -> None:
    """What the engine evicts comes back from the store; what a run before has stored is not computed at all."""
    order = list(plan.order) if is_planned else list(range(len(PROMPTS)))
    settings = {"model": str(model), **SEQUENTIAL, "kv_transfer_config": transfer({"root": str(tmp_root)})}
    for name, most in (("first", plan.tokens_to_compute), ("again", len(PROMPTS) * BLOCK_TOKENS)):
        with running_engine(workplace, settings) as engine:
            ran = engine.generate(*(PROMPTS[index] for index in order), tokens=OUTPUT_TOKENS)
        ran = in_arrival_order(ran, order)
        told(f"with the store, {'planned' if is_planned else 'arrival'}, {name}", ran, plan)
        ran.check_same(arrival)
        assert computed(ran) <= (1 + PROMISE) * most


def lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())


def test_the_command_sends_a_batch_to_a_server(
    workplace: Path, tmp_path: Path, model: Path, plan: Plan, arrival: Answer
) -> None:
    file, results = tmp_path / "batch.jsonl", tmp_path / "results.jsonl"
    body = {"model": "tiny", "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"detokenize": False, "return_token_ids": True}
    requests = [
        {"custom_id": f"q{at}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": each}}
        for at, each in enumerate(PROMPTS)
    ]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    options = ["--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "1", "--enable-prompt-tokens-details"]
    words = ["--memory-tokens", str(MEMORY_TOKENS), "--block-tokens", str(BLOCK_TOKENS), "--results", str(results)]
    with running_server(workplace, model, *options) as url:
        began_s = time.monotonic()
        command = ["plan", str(file), *words, "--server", url, "--concurrency", "1", "--json"]
        done = CliRunner().invoke(app, command, prog_name="kvstore")
        print(f"kvstore plan --server: {time.monotonic() - began_s:.2f} s\n{done.stdout}")
    assert done.exit_code == 0, done.output
    answers = {each["custom_id"]: each["response"]["body"] for each in lines(results)}
    tokens = [answers[f"q{at}"]["choices"][0]["token_ids"] for at in range(len(PROMPTS))]
    assert tokens == arrival.tokens
    cached = sum(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers.values())
    assert TOKENS - cached == pytest.approx(plan.tokens_to_compute, rel=PROMISE)
