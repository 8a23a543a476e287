"""Hints of requests: their priority is that of their blocks, and the collector never takes what they pin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.core.recency import PRIORITY_DEFAULT, decode
from kvstore.engine.settings import Limits
from tests.engines.vllm.engines import (
    Engine,
    collect,
    full_blocks,
    prompt,
    running_engine,
    stored_files,
    transfer,
    wait_stored,
)
from tests.kit.patience import eventually

BLOCK = 32
BLOCKS = 9
"""Full blocks of a prompt of 300 tokens."""


@pytest.fixture(scope="module")
def started(workplace: Path, module_root: Path, model: Path) -> Iterator[Engine]:
    place = {"root": str(module_root), "max_bytes": None}
    settings = {"model": str(model), "num_gpu_blocks_override": 64, "kv_transfer_config": transfer(place)}
    with running_engine(workplace, settings) as engine:
        yield engine


@pytest.fixture
def engine(started: Engine, module_root: Path) -> Engine:
    """The engine, on a root without blocks."""
    started.forget()
    collect(module_root, "--ttl", "0s")
    assert not stored_files(module_root)
    return started


def test_priority_of_a_request_is_that_of_its_blocks(engine: Engine, module_root: Path) -> None:
    for seed, urgency in ((7400, -5), (7401, 5)):
        before = set(stored_files(module_root))
        engine.generate(prompt(seed, 300), priority=urgency)
        wait_stored(module_root, len(before) + BLOCKS)
        fresh = set(stored_files(module_root)) - before
        found = {decode(path.stat().st_mtime_ns, Limits().quantum_s).hints.priority for path in fresh}
        assert found == {PRIORITY_DEFAULT - urgency}


def test_pinned_prompt_stays_until_a_request_unpins_it(engine: Engine, module_root: Path) -> None:
    pinned = prompt(7500, 300)
    engine.hinted(pinned, pin="main")
    engine.generate(prompt(7501, 300))
    wait_stored(module_root, 2 * BLOCKS)
    eventually(lambda: pins(module_root) == [("main", BLOCKS * BLOCK)])
    collect(module_root, "--ttl", "0s")
    assert len(stored_files(module_root)) == BLOCKS
    engine.forget()
    assert engine.generate(pinned).cached == [full_blocks(pinned)]
    engine.hinted(prompt(7600, 20), unpin="main")
    eventually(lambda: pins(module_root) == [])
    collect(module_root, "--ttl", "0s")
    assert not stored_files(module_root)


def pins(root: Path) -> list[tuple[str, int]]:
    """Owner and tokens of each pin."""
    with kvstore.open(str(root), max_bytes=None) as store:
        return [(pin.owner, pin.tokens) for pin in store.pins()]
