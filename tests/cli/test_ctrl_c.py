"""Ctrl-C at any moment of any command: exit code 130, one line, and never a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from kvstore.cli.app import COMMANDS
from kvstore.cli.signals import Stopper
from tests.cli.conftest import SOURCE
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S

INTERRUPTING = """
import os, signal, sys
from importlib import import_module

module, left = sys.argv[1], int(sys.argv[2])
sys.argv[1:3] = []
main = import_module(module).main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
main()
"""
"""A program that presses Ctrl-C as it imports the n-th module after its start."""


def interrupted(module: str, number: int, *arguments: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTING, module, str(number), *arguments],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.slow
@for_each("number", [1, 2, 30, 100, 150, 200, 250, 300, 350, 400, 500])
def test_ctrl_c_while_modules_are_imported(number: int, tmp_path: Path) -> None:
    code, out, said = interrupted("kvstore.cli.main", number, "ls", "--root", str(tmp_path / "missing"))
    if code == 2:
        assert "does not exist" in said  # it imports fewer modules
        return
    assert (code, out) == (130, "")
    assert said in ("kvstore: interrupted\n", "kvstore ls: interrupted\n")


@pytest.mark.slow
@for_each("number", [1, 100])
def test_ctrl_c_while_the_collector_is_imported(number: int) -> None:
    assert interrupted("kvstore_gc.__main__", number, "--help") == (130, "", "kvstore-gc: interrupted\n")


@for_each("command", [name for name in COMMANDS if name != "token"])
def test_ctrl_c_in_a_command(command: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    found = __import__("kvstore.cli.app", fromlist=["app"]).app.get_command(None, command)
    monkeypatch.setattr(found, "callback", interrupt)
    monkeypatch.setattr(found, "params", [])
    result = run(command)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", f"kvstore {command}: interrupted\n")


LOST = """
import os, signal, sys, time, click
from kvstore.cli.command import Command
from kvstore.cli.ctrl_c import ends_at_once

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

@click.command(cls=Command)
def lost():
    thing = Finalized()
    del thing  # Python raises nothing out of a finalizer
    time.sleep(3600)

ends_at_once("kvstore")
lost(prog_name="kvstore lost")
"""


def test_ctrl_c_where_python_cannot_raise_it_comes_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOST], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "kvstore lost: interrupted\n")


LATE = """
import os, signal, time
from kvstore.cli.ctrl_c import ends_at_once

class Late:
    def __del__(self, pid=os.getpid(), kill=os.kill, number=signal.SIGINT, sleep=time.sleep):
        kill(pid, number)  # handlers of Python are gone by now
        sleep(0.1)

ends_at_once("kvstore")
late = Late()
print("done")
raise SystemExit(1)
"""


def test_ctrl_c_after_a_command_is_done_leaves_it_its_exit_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "done\n", "")


def test_a_server_that_ctrl_c_ends_says_so_at_the_end() -> None:
    with pytest.raises(BaseException, match="SIGINT") as ended:
        with Stopper() as stopper:
            signal.raise_signal(signal.SIGINT)
            assert stopper.wait(0.0)
    assert ended.value.exit_code == 130  # type: ignore[attr-defined]
    with Stopper() as stopper:
        signal.raise_signal(signal.SIGTERM)
