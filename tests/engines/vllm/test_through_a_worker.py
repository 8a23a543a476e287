"""vLLM in separate processes (engine core, worker), whose store is a worker over gRPC: down, frozen, slow."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import (
    Answer,
    Engine,
    check_clean,
    full_blocks,
    running_engine,
    running_worker,
    transfer,
    wait_stored,
)

LONG = PROMPTS["long"]
LOOKUP_S, LOAD_S = 1.0, 2.0
BOUND_S = LOOKUP_S + 3 * LOAD_S + 5.0
"""What a store that hangs may cost one request: a look-up, then a load and the step that was waiting for it. The rest
is for a busy machine."""


@pytest.fixture(scope="module")
def worker(root: Path, etcd: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with running_worker(root, etcd) as started:
        yield started


@pytest.fixture(scope="module")
def engine(
    workplace: Path, model: Path, worker: tuple[str, subprocess.Popen[str]], reference: dict[str, Answer]
) -> Iterator[Engine]:
    place = {"connect": worker[0], "lookup_timeout_s": LOOKUP_S, "load_timeout_s": LOAD_S, "pause_s": 1.0}
    settings = {"model": str(model), "kv_transfer_config": transfer(place)}
    with running_engine(workplace, settings, processes=True) as started:
        yield started


def test_it_stores_and_loads(engine: Engine, root: Path, reference: dict[str, Answer]) -> None:
    for name in ("long", "other"):
        engine.generate(PROMPTS[name]).check_same(reference[name])
    wait_stored(root, 9 + 6)
    engine.forget()
    answer = engine.generate(LONG)
    answer.check_same(reference["long"])
    assert answer.cached == [full_blocks(LONG)]
    assert engine.counts()["vllm:external_prefix_cache_hits"] == full_blocks(LONG)


def test_a_frozen_store_costs_a_bounded_time(
    engine: Engine, worker: tuple[str, subprocess.Popen[str]], reference: dict[str, Answer]
) -> None:
    engine.forget()
    worker[1].send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):
            answer = engine.generate(LONG)
            answer.check_same(reference["long"])
            assert answer.seconds < BOUND_S
            engine.forget()
    finally:
        worker[1].send_signal(signal.SIGCONT)


def test_a_store_that_freezes_between_look_up_and_load(
    engine: Engine, worker: tuple[str, subprocess.Popen[str]], reference: dict[str, Answer]
) -> None:
    engine.load(LONG, reference["long"], full_blocks(LONG))
    for pause_s in (0.0, 0.005, 0.02):
        engine.forget()
        engine.begin(LONG)
        time.sleep(pause_s)
        worker[1].send_signal(signal.SIGSTOP)
        try:
            answer = engine.end()
        finally:
            worker[1].send_signal(signal.SIGCONT)
        answer.check_same(reference["long"])
        assert answer.seconds < BOUND_S
        engine.load(LONG, reference["long"], full_blocks(LONG))


def test_a_dead_store_is_a_miss(
    engine: Engine, root: Path, worker: tuple[str, subprocess.Popen[str]], reference: dict[str, Answer]
) -> None:
    worker[1].kill()
    worker[1].wait()
    for name in ("long", "other", "branch"):
        engine.forget()
        answer = engine.generate(PROMPTS[name])
        answer.check_same(reference[name])
        assert answer.cached == [0]
        assert answer.seconds < BOUND_S
    check_clean(root)
