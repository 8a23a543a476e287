"""What requests say of their KV: the collector takes a branch that its session left first, and never what is pinned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.node.limits import Limits
from kvstore.recency import decode
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
from tests.patience import eventually

BLOCK = 32
SHARED, MAIN_BLOCKS, FORK_BLOCKS = 5, 10, 4
"""Blocks that both branches share, all of the main one, and those of the fork behind the shared ones."""
MAIN = prompt(71, 300)
FORK = MAIN[: SHARED * BLOCK] + prompt(72, 140)
GOES_ON = MAIN + prompt(73, 40)


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
    truth = run(engine, module_root, "first")
    eventually(lambda: abandoned(module_root) == [SHARED + at for at in range(FORK_BLOCKS)])
    make_room(module_root)
    assert len(stored_files(module_root)) == MAIN_BLOCKS
    check_hits(engine, truth, main=full_blocks(GOES_ON), fork=SHARED * BLOCK)


def test_a_fork_whose_requests_say_that_it_stays_does_not(engine: Engine, module_root: Path) -> None:
    run(engine, module_root, "forking", {"supersede": False})
    engine.in_session("forking", prompt(74, 20))  # a later end of a request: what was told before is done
    make_room(module_root)
    assert abandoned(module_root) == []
    engine.forget()
    assert engine.generate(GOES_ON).cached[0] < full_blocks(GOES_ON), "the deepest blocks of both went"


def test_a_branch_that_is_used_again_is_not_first_any_more(engine: Engine, module_root: Path) -> None:
    truth = run(engine, module_root, "returning")
    eventually(lambda: len(abandoned(module_root)) == FORK_BLOCKS)
    engine.forget()
    assert engine.in_session("other", FORK).tokens == [truth[1]]
    eventually(lambda: abandoned(module_root) == [])
    make_room(module_root)
    engine.forget()
    assert engine.generate(FORK).cached[0] > SHARED * BLOCK


def test_a_prompt_that_a_request_pins_stays_until_one_unpins_it(engine: Engine, module_root: Path) -> None:
    engine.in_session("pinned", MAIN, said={"pin": "main"})
    engine.in_session("loose", FORK)
    wait_stored(module_root, MAIN_BLOCKS - 1 + FORK_BLOCKS)

    def kept(blocks: int) -> bool:
        collect(module_root, "--ttl", "0s")
        return len(stored_files(module_root)) == blocks

    eventually(lambda: pinned(module_root) == [("main", (MAIN_BLOCKS - 1) * BLOCK)])
    assert kept(MAIN_BLOCKS - 1), "the fork's own blocks went"
    engine.forget()
    assert engine.generate(MAIN).cached == [full_blocks(MAIN)]
    engine.in_session("loose", prompt(75, 20), said={"unpin": "main"})
    eventually(lambda: pinned(module_root) == [])
    assert kept(0)


def pinned(root: Path) -> list[tuple[str, int]]:
    """Owner and tokens of each pin."""
    with kvstore.open(str(root), max_bytes=None) as store:
        return [(pin.owner, pin.tokens) for pin in store.pins()]


def run(engine: Engine, root: Path, session: str, fork: dict[str, bool] | None = None) -> list[list[int]]:
    """A session forks, and then goes on where it was before; returns the tokens of both branches."""
    engine.in_session(session, MAIN)
    forked = engine.in_session(session, FORK, said=fork)
    wait_stored(root, MAIN_BLOCKS - 1 + FORK_BLOCKS)
    main = engine.in_session(session, GOES_ON)
    wait_stored(root, MAIN_BLOCKS + FORK_BLOCKS)
    return [*main.tokens, *forked.tokens]


def abandoned(root: Path) -> list[int]:
    """The places in their prompts of superseded blocks."""
    found = [decode(path.stat().st_mtime_ns, Limits().quantum_s) for path in stored_files(root)]
    return sorted(each.depth for each in found if each.is_superseded)


def make_room(root: Path) -> None:
    """Collects as many blocks as the fork has of its own."""
    files = stored_files(root)
    size = sum(path.stat().st_size for path in files)
    low = (MAIN_BLOCKS + 0.5) / len(files)
    collect(root, "--max-bytes", str(size), "--high", f"{low + 0.05:.3f}", "--low", f"{low:.3f}")


def check_hits(engine: Engine, truth: list[list[int]], *, main: int, fork: int) -> None:
    """Asserts equal tokens, and how many of each branch came from the store."""
    for tokens, expected, cached in zip((GOES_ON, FORK), truth, (main, fork), strict=True):
        engine.forget()
        answer = engine.generate(tokens)
        assert (answer.tokens, answer.cached) == ([expected], [cached])
