"""``kvstore prefetch`` against a worker with memory, and Ctrl-C in commands that follow an operation."""

from __future__ import annotations

import signal
import subprocess

import numpy as np
import pytest

from kvstore.engine.prefetch import Prefetcher
from tests.cli.conftest import KVSTORE, PATIENCE_S, SOURCE, Run, parsed
from tests.kit.cases import for_each
from tests.kit.memory_workers import waiters, working
from tests.kit.tiers import eventually, faulty
from tests.kit.workers import Served, connected

pytestmark = pytest.mark.slow


def text_of(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    return ",".join(map(str, tokens.tolist()))


def test_prompt_is_prefetched_by_command(run: Run) -> None:
    with working(faulty()) as (acting, served):
        acting.put(1, 6)
        tokens, at = text_of(acting.prompts.tokens(1, 7)), ("--connect", served.address)
        size = acting.size
        document = parsed(run("prefetch", "m", tokens, *at, "--json"))
        assert (document["namespace"], document["tokens"], document["state"]) == ("m", 7 * size, "done")
        assert (document["done"], document["total"], document["message"]) == (6 * size, 6 * size, "")
        assert all(acting.in_memory(1, 6))
        again = run("prefetch", "m", tokens, "--worker", served.address, *at)
        assert again.stdout == f"prefetched {6 * size} of {6 * size} stored tokens\n"


@for_each(
    "arguments, message",
    [
        (("prefetch", "m", "1,2", "--root", "/x"), "give --connect HOST:PORT or --etcd"),
        (("prefetch", "m", "1,2", "--tier", "disk", "--connect", "WORKER"), "no local disk; start it with --disk"),
    ],
)
def test_wrong_prefetch_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    with working(faulty()) as (_, served):
        result = run(*(served.address if each == "WORKER" else each for each in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1


def interrupted(served: Served, *command: str) -> str:
    """Runs a command until it waits for its operation, sends SIGINT, and returns standard error."""
    child = subprocess.Popen(
        [*KVSTORE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=SOURCE
    )
    try:
        eventually(lambda: waiters(served))
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=PATIENCE_S)
    finally:
        child.kill()
    assert child.returncode == 130 and error.endswith("Aborted!\n")
    return error


@for_each("command", [("prefetch", "m", "1,2"), ("clear", "m", "--yes")])
def test_ctrl_c_cancels_the_operation_at_the_worker(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*arguments: object, **how: object) -> None:
        run = next(each for each in served.member.node.operations.every())
        while True:
            run.pause(PATIENCE_S)

    with working(faulty()) as (acting, served), connected(served) as store:
        acting.put(1, 1)
        monkeypatch.setattr(Prefetcher, "run", endless)
        monkeypatch.setattr(served.member, "clear_selected", endless)
        error = interrupted(served, *command, "--connect", served.address)
        assert f"{command[0]} cancelled after 0" in error
        assert [each.state for each in store.operations()] == ["cancelled"]
