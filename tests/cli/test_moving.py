"""``kvstore prefetch``, ``move`` and ``release``, against a worker with memory in this process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from click.testing import Result

from kvstore.writes import WriteMode
from tests.cli.conftest import KVSTORE, PATIENCE_S, SOURCE, parsed
from tests.kit.cases import for_each
from tests.kit.tiers import eventually, faulty, held
from tests.worker.test_moves import idle, working

Run = Callable[..., Result]
pytestmark = pytest.mark.slow


def text_of(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    return ",".join(map(str, tokens.tolist()))


def test_a_prompt_is_prefetched_moved_and_released(run: Run) -> None:
    with working(faulty()) as (acting, served):
        acting.put(1, 6)
        tokens, at = text_of(acting.prompts.tokens(1, 7)), ("--connect", served.address)
        size = acting.size
        said = parsed(run("prefetch", "m", tokens, *at, "--json"))
        assert said == {
            "namespace": "m",
            "tokens": 7 * size,
            "tokens_matched": 6 * size,
            "tokens_prefetched": 6 * size,
            "error": None,
        }
        assert all(acting.in_memory(1, 6))
        assert run("release", "m", tokens, *at).stdout == f"released {6 * size} of {6 * size} stored tokens\n"
        assert (
            run("move", "m", tokens, "--tier", "root", *at).stdout == f"moved {6 * size} of {6 * size} stored tokens\n"
        )
        assert not any(acting.in_memory(1, 6))


@for_each(
    "arguments, said",
    [
        (("prefetch", "m", "1,2", "--root", "/x"), "give --connect HOST:PORT or --etcd"),
        (("prefetch", "m", "1,2"), "which store? give --root URL"),
        (("prefetch", "m", "1,2", "--tier", "disk", "--connect", "WORKER"), "no local disk; start it with --disk"),
        (("release", "nobody", "1,2", "--connect", "WORKER"), "there is no namespace 'nobody'"),
        (("move", "m", "--tier", "root", "--connect", "WORKER"), "no tokens are given"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], said: str) -> None:
    with working(faulty()) as (_, served):
        result = run(*(served.address if each == "WORKER" else each for each in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_ctrl_c_ends_it_at_the_worker_too() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served):
        with held(root):
            acting.put(1, 6)
            tokens = text_of(acting.prompts.tokens(1, 6))
            command = [*KVSTORE, "move", "m", tokens, "--tier", "root", "--connect", served.address]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=SOURCE)
            try:
                eventually(lambda: not idle(served))
                child.send_signal(signal.SIGINT)
                _, said = child.communicate(timeout=PATIENCE_S)
            finally:
                child.kill()
            assert (child.returncode, said) == (130, "Aborted!\n")
            eventually(lambda: idle(served))
        assert acting.get(1, 6) == 6
