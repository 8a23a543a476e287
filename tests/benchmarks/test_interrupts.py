"""Ctrl-C in a benchmark, which a terminal sends to all that it started: one line, exit code 130, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.kit.patience import PATIENCE_S, eventually

SOURCE = Path(__file__).parents[2]
BENCH = [sys.executable, "-m", "kvstore.cli.main", "bench"]


def in_a_terminal(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*BENCH, *arguments],
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as in a terminal
    )


def members_of(group: int) -> int:
    """Programs of a group that have begun: each has a command line."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            is_member = int(stat.read_text().rpartition(")")[2].split()[2]) == group
            found += is_member and bool(stat.with_name("cmdline").read_bytes())
        except OSError:
            continue
    return found


def test_programs_that_it_started_say_nothing() -> None:
    running = in_a_terminal("workers", "--quick")
    try:
        assert running.stderr is not None
        assert "workers (1 of 1)" in running.stderr.readline()
        eventually(lambda: members_of(running.pid) >= 2, "its programs begin")
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=PATIENCE_S)
        assert (running.returncode, said) == (130, "kvstore bench: interrupted\n")
        eventually(lambda: not members_of(running.pid), "nothing is left")
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
