"""Real ``kvstore`` programs for the tests here, and the command line called in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.app import app
from tests.kit.patience import PATIENCE_S as PATIENCE_S
from tests.kit.patience import eventually as eventually

KVSTORE = (sys.executable, "-m", "kvstore.cli.main")
SOURCE = Path(__file__).parents[2]
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Calls the command line in this process."""

    def call(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="kvstore")

    return call


def parsed(result: Result) -> Any:
    """The one JSON document on standard output."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def descendants(pid: int) -> dict[int, str]:
    """Live programs that ``pid`` started, directly or not, and their command lines."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
    found: dict[int, str] = {}
    grown = True
    while grown:
        grown = False
        for child, its_parent in parents.items():
            if child not in found and (its_parent == pid or its_parent in found):
                found[child] = command_line(child)
                grown = True
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def gone(pids: dict[int, str]) -> bool:
    """True once none of these programs runs."""
    for each, command in pids.items():
        try:
            state = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and command_line(each) == command:
            return False
    return True


@dataclass
class Running:
    """A ``kvstore up`` or ``kvstore worker`` that serves."""

    child: subprocess.Popen[str]
    ready: str
    log: Path

    @property
    def said(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.ready.split()[1:])

    @property
    def grpc(self) -> str:
        return self.said["grpc"]

    @property
    def etcd(self) -> str:
        return self.said["etcd"]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits; the exit code."""
        self.child.send_signal(number)
        return self.child.wait(PATIENCE_S)

    def rest(self) -> str:
        """Returns its output after the first line; only once it has ended."""
        assert self.child.stdout is not None
        return self.child.stdout.read()


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Running]:
    """``kvstore ARGUMENTS`` until it says that it serves; stopped afterwards, if the test did not."""
    log = folder / f"{arguments[0]}-{time.monotonic_ns()}.log"
    with open(log, "w") as messages:
        child = subprocess.Popen(
            [*KVSTORE, *arguments],
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            cwd=SOURCE,
            env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        )
    assert child.stdout is not None
    try:
        ready = child.stdout.readline()
        assert ready.startswith("ready "), f"it said {ready!r}: {log.read_text()}"
        yield Running(child, ready, log)
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        child.stdout.close()


@pytest.fixture(scope="module")
def up(module_root: Path) -> Iterator[Running]:
    """A cluster of two workers on one root, shared by a module."""
    with serving(
        module_root, "up", "--root", str(module_root / "root"), "--listen", "127.0.0.1:0", "--workers", "2"
    ) as running:
        yield running
