"""An engine that opens the root itself, as a member of the cluster: it stores, loads, and survives trouble."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import CROWD, CROWD_TOKENS, PROMPTS
from tests.engines.vllm.engines import (
    Answer,
    Engine,
    check_clean,
    full_blocks,
    mend,
    running_engine,
    running_program,
    stored_files,
    transfer,
    wait_stored,
)
from tests.kit.collecting import bounded_to
from tests.kit.stores import flip

LONG, BRANCH = PROMPTS["long"], PROMPTS["branch"]
LONG_BLOCKS = full_blocks(LONG) // 32


@pytest.fixture(scope="module")
def engine(workplace: Path, model: Path, root: Path, etcd: str, reference: dict[str, Answer]) -> Iterator[Engine]:
    place = {"root": str(root), "etcd": etcd}
    settings = {"model": str(model), "num_gpu_blocks_override": 48, "kv_transfer_config": transfer(place)}
    with running_engine(workplace, settings) as started:
        yield started


@pytest.mark.smoke
def test_what_one_request_computed_the_next_one_loads(engine: Engine, root: Path, reference: dict[str, Answer]) -> None:
    first = engine.generate(LONG)
    first.check_same(reference["long"])
    assert first.cached == [0]
    wait_stored(root, LONG_BLOCKS)
    engine.forget()
    second = engine.generate(LONG)
    second.check_same(reference["long"])
    assert second.cached == [full_blocks(LONG)]


def test_a_shared_prefix_is_loaded_and_the_rest_computed(engine: Engine, reference: dict[str, Answer]) -> None:
    engine.forget()
    engine.generate(LONG, tokens=1)
    engine.forget()
    answer = engine.generate(BRANCH)
    answer.check_same(reference["branch"])
    assert answer.cached[0] in (128, full_blocks(BRANCH))


def test_requests_for_one_prompt_that_come_together_load_it_once(
    engine: Engine, root: Path, reference: dict[str, Answer]
) -> None:
    engine.generate(LONG, tokens=1)
    block_bytes = max(path.stat().st_size for path in wait_stored(root, LONG_BLOCKS))
    engine.forget()
    before = engine.counts()["vllm:kvstore_loaded_bytes"]
    answer = engine.generate(LONG, LONG, LONG)
    assert answer.tokens == reference["long"].tokens * 3 and answer.cached == [full_blocks(LONG)] * 3
    loaded = engine.counts()["vllm:kvstore_loaded_bytes"] - before
    assert 0 < loaded <= LONG_BLOCKS * block_bytes, "the others took it from the engine's own cache"


def test_preempted_requests_go_on_from_what_was_stored(engine: Engine, reference: dict[str, Answer]) -> None:
    before = engine.counts()
    engine.forget()
    answer = engine.generate(*CROWD, tokens=CROWD_TOKENS)
    assert answer.tokens == reference["crowd"].tokens
    after = engine.counts()
    assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"]
    assert after["vllm:kvstore_loaded_blocks"] > before["vllm:kvstore_loaded_blocks"]


def test_a_damaged_block_is_computed_anew_and_repaired(
    engine: Engine, root: Path, reference: dict[str, Answer]
) -> None:
    engine.forget()
    engine.generate(LONG)
    before = engine.counts()["vllm:kvstore_load_failed_blocks"]
    files = stored_files(root)
    found = {path.stat().st_ino for path in files}
    for path in files:
        flip(path)
    engine.forget()
    answer = engine.generate(LONG)
    answer.check_same(reference["long"])
    assert answer.reasons == ["length"]
    # One load failed, at its first block; a retry loop would fail again and again.
    assert 1 <= engine.counts()["vllm:kvstore_load_failed_blocks"] - before <= 2
    engine.load(LONG, reference["long"], full_blocks(LONG))  # repaired
    assert {path.stat().st_ino for path in stored_files(root)} != found
    mend(root)


def test_garbage_collection_at_full_tilt_costs_misses_only(
    engine: Engine, root: Path, etcd: str, reference: dict[str, Answer]
) -> None:
    with running_program(
        "tests.kit.collecting", "--root", str(root), "--etcd", etcd, "--interval", "0.1", *bounded_to(60 << 10)
    ):
        ends_s = time.monotonic() + 8
        cached = []
        while time.monotonic() < ends_s:
            for name in ("long", "branch", "other"):
                engine.forget()
                answer = engine.generate(PROMPTS[name])
                answer.check_same(reference[name])
                cached.append((name, *answer.cached))
        # It did take something away in between.
        assert len(set(cached)) > 3
    check_clean(root)


def test_after_an_update_of_the_weights_in_memory_nothing_older_is_loaded(
    engine: Engine, reference: dict[str, Answer]
) -> None:
    engine.forget(connector=True)
    answer = engine.generate(LONG)
    answer.check_same(reference["long"])
    assert answer.cached == [0]


def test_an_engine_killed_while_it_stores_leaves_a_clean_root(
    engine: Engine, root: Path, reference: dict[str, Answer]
) -> None:
    crowd = [[3 + shift, *LONG] for shift in range(8)]
    engine.load(LONG, reference["long"], full_blocks(LONG))  # the weights' update left it to be stored anew
    before = len(stored_files(root))
    engine.begin(*crowd, tokens=50)
    time.sleep(0.05)
    engine.kill()
    check_clean(root)
    assert len(stored_files(root)) <= before + 8 * (len(LONG) + 50) // 32
