"""What requests say of their KV: the collector takes a branch that its session left first, and never what is pinned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from tests.kit.collecting import bounded_to
from tests.kit.patience import eventually

BLOCK = 32
SHARED, MAIN_BLOCKS, FORK_BLOCKS = 5, 10, 4
"""Blocks that both branches share, all of the main one, and those of the fork behind the shared ones."""


class Work:
    """The prompts of one session, which no other session has: what others have is not abandoned."""

    def __init__(self, seed: int) -> None:
        self.session = f"session {seed}"
        self.main = prompt(seed, 300)
        self.fork = self.main[: SHARED * BLOCK] + prompt(seed + 1, 140)
        self.goes_on = self.main + prompt(seed + 2, 40)


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


def test_the_branch_that_a_session_abandoned_goes_first(engine: Engine, module_root: Path) -> None:
    work = Work(7100)
    main, fork = run(engine, module_root, work)
    eventually(lambda: abandoned(module_root) == [SHARED + at for at in range(FORK_BLOCKS)])
    make_room(module_root)
    assert len(stored_files(module_root)) == MAIN_BLOCKS
    for tokens, truth, cached in ((work.goes_on, main, full_blocks(work.goes_on)), (work.fork, fork, SHARED * BLOCK)):
        engine.forget()
        answer = engine.generate(tokens)
        assert (answer.tokens, answer.cached) == ([truth], [cached])


def test_what_vllm_schedules_first_stays_longer(engine: Engine, module_root: Path) -> None:
    for seed, urgency in ((7400, -5), (7401, 5)):
        before = set(stored_files(module_root))
        engine.generate(prompt(seed, 300), priority=urgency)
        wait_stored(module_root, len(before) + 9)
        fresh = set(stored_files(module_root)) - before
        found = {decode(path.stat().st_mtime_ns, Limits().quantum_s).hints.priority for path in fresh}
        assert found == {PRIORITY_DEFAULT - urgency}


def test_a_prompt_that_a_request_pins_stays_until_one_unpins_it(engine: Engine, module_root: Path) -> None:
    work = Work(7500)
    engine.in_session(work.session, work.main, said={"pin": "main"})
    engine.in_session("loose", work.fork)
    wait_stored(module_root, MAIN_BLOCKS - 1 + FORK_BLOCKS)
    eventually(lambda: pinned(module_root) == [("main", (MAIN_BLOCKS - 1) * BLOCK)])
    collect(module_root, "--ttl", "0s")
    assert len(stored_files(module_root)) == MAIN_BLOCKS - 1, "the fork's own blocks went"
    engine.forget()
    assert engine.generate(work.main).cached == [full_blocks(work.main)]
    engine.in_session("loose", prompt(7600, 20), said={"unpin": "main"})
    eventually(lambda: pinned(module_root) == [])
    collect(module_root, "--ttl", "0s")
    assert not stored_files(module_root)


def pinned(root: Path) -> list[tuple[str, int]]:
    """Owner and tokens of each pin."""
    with kvstore.open(str(root), max_bytes=None) as store:
        return [(pin.owner, pin.tokens) for pin in store.pins()]


def run(engine: Engine, root: Path, work: Work, fork: dict[str, bool] | None = None) -> list[list[int]]:
    """A session forks, and then goes on where it was before; returns the tokens of both branches."""
    before = len(stored_files(root))
    engine.in_session(work.session, work.main)
    forked = engine.in_session(work.session, work.fork, said=fork)
    wait_stored(root, before + MAIN_BLOCKS - 1 + FORK_BLOCKS)
    main = engine.in_session(work.session, work.goes_on)
    wait_stored(root, before + MAIN_BLOCKS + FORK_BLOCKS)
    return [*main.tokens, *forked.tokens]


def abandoned(root: Path) -> list[int]:
    """The places in their prompts of all superseded blocks."""
    return places(stored_files(root))


def places(files: Iterable[Path]) -> list[int]:
    """The places in their prompts of those blocks that are superseded."""
    found = [decode(path.stat().st_mtime_ns, Limits().quantum_s) for path in files]
    return sorted(each.depth for each in found if each.is_superseded)


def make_room(root: Path) -> None:
    """Collects as many blocks as the fork has of its own."""
    files = stored_files(root)
    size = sum(path.stat().st_size for path in files)
    low = (MAIN_BLOCKS + 0.5) / len(files)
    collect(root, *bounded_to(int(size * low / 0.95)))
