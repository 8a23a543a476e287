"""Hints of requests: their priority is that of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.recency import PRIORITY_DEFAULT, decode
from kvstore.engine.settings import Limits
from tests.engines.vllm.engines import Engine, collect, prompt, running_engine, stored_files, transfer, wait_stored

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


def priorities(root: Path, ask: Callable[[], object]) -> set[int]:
    """The priorities of the blocks that a request stores."""
    before = set(stored_files(root))
    ask()
    wait_stored(root, len(before) + BLOCKS)
    fresh = set(stored_files(root)) - before
    return {decode(path.stat().st_mtime_ns, Limits().quantum_s).hints.priority for path in fresh}


def test_priority_of_a_request_is_that_of_its_blocks(engine: Engine, module_root: Path) -> None:
    urgent = priorities(module_root, lambda: engine.generate(prompt(7400, 300), priority=-5))
    late = priorities(module_root, lambda: engine.generate(prompt(7401, 300), priority=5))
    hinted = priorities(module_root, lambda: engine.hinted(prompt(7402, 300), priority=80))
    assert (urgent, late, hinted) == ({PRIORITY_DEFAULT + 5}, {PRIORITY_DEFAULT - 5}, {80})
