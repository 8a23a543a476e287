"""How a command learns which store is meant: options, the environment, or one line that says what to give."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvstore
from kvstore.cli.app import app
from kvstore_gc.cli import command as collector
from tests.cli.conftest import parsed
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S
from tests.kit.workers import serving

Run = Callable[..., Result]

LAYOUT = kvstore.Layout(layers=1, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=4)
UNREACHED = "127.0.0.1:9"


def filled(root: Path, name: str) -> str:
    with kvstore.open(root) as store:
        store.namespace(name, LAYOUT).put(range(4), np.zeros(LAYOUT.shape(4), np.int8))
    return str(root)


@pytest.fixture
def root(tmp_root: Path) -> str:
    return filled(tmp_root / "one", "first")


def names(result: Result) -> list[str]:
    return [each["name"] for each in parsed(result)["namespaces"]]


def test_a_root_of_the_environment(run: Run, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ROOT", root)
    assert names(run("ls", "--json")) == ["first"]
    assert run("match", "first", "0,1,2,3").stdout == "4 of 4 tokens\n"
    assert run("fsck", "--json").exit_code == run("stats", "--json").exit_code == 0


def test_what_is_typed_wins_over_the_environment(
    run: Run, root: str, tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = filled(tmp_root / "two", "second")
    monkeypatch.setenv("KVSTORE_ROOT", root)
    monkeypatch.setenv("KVSTORE_CONNECT", UNREACHED)
    assert names(run("ls", "--root", other, "--json")) == ["second"]
    assert run("fsck", other, "--json").stdout == run("fsck", "--root", other, "--json").stdout
    with serving(Path(other)) as served:
        assert names(run("ls", "--connect", served.address, "--json")) == ["second"]
        monkeypatch.setenv("KVSTORE_CONNECT", served.address)
        assert names(run("ls", "--json")) == ["second"], "workers win over the root"


def test_etcd_of_the_environment(run: Run, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ETCD", UNREACHED)
    monkeypatch.setenv("KVSTORE_ROOT", root)
    assert "etcd" in run("ls").stderr
    assert "etcd" in run("ls", "--root", root).stderr
    assert names(run("ls", "--root", root, "--etcd", "", "--json")) == ["first"]


@for_each("command", ["health", "drain"])
def test_a_command_for_workers_uses_etcd_beside_a_root(
    run: Run, root: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_ROOT", root)
    monkeypatch.setenv("KVSTORE_ETCD", UNREACHED)
    for options in ((), ("--root", root, "--etcd", UNREACHED)):
        result = run(command, *options)
        assert result.exit_code == 2 and f"etcd at {UNREACHED} did not answer" in result.stderr, result.output


@for_each(
    "arguments, said",
    [
        (("ls",), "which store? give --root URL, --connect HOST:PORT[,HOST:PORT] or --etcd ENDPOINTS, or set"),
        *(((name,), "which store?") for name in ("stats", "health", "limits", "ops")),
        (("match", "m", "1"), "which store?"),
        (("clear", "m", "--yes"), "which store?"),
        *((each, "which root? give --root URL") for each in (("up",), ("worker", "--listen", "h:0"), ("fsck",))),
        (("fsck", "here", "--root", "there"), "give one of them"),
        (("dashboard",), "which root? give --root URL"),
        (("dashboard", "--root", "x"), "give --etcd ENDPOINTS"),
    ],
)
def test_command_without_a_target_names_the_options(run: Run, arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


@for_each(
    "arguments, said",
    [(("--once",), "which root? give --root URL"), (("--root", "x", "--once"), "x does not exist")],
)
def test_so_does_the_collector(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(collector, list(arguments), prog_name="kvstore-gc")
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_collector_reads_the_environment_too(tmp_root: Path) -> None:
    # A program of its own: it sets up the log and the priority of its process.
    ended = subprocess.run(
        [sys.executable, "-m", "kvstore_gc", "--once"],
        env={**os.environ, "KVSTORE_ROOT": str(tmp_root / "missing"), "KVSTORE_ETCD": UNREACHED},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2 and "missing does not exist" in ended.stderr


def test_the_command_says_its_version(run: Run) -> None:
    assert run("-v").output == run("--version").output == f"kvstore, version {kvstore.__version__}\n"


@for_each("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands(shell: str) -> None:
    script = CliRunner().invoke(app, env={"_KVSTORE_COMPLETE": f"{shell}_source"}, prog_name="kvstore").stdout
    assert "_KVSTORE_COMPLETE" in script and "kvstore" in script
    asked = {"_KVSTORE_COMPLETE": "bash_complete", "COMP_WORDS": "kvstore look", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, env=asked, prog_name="kvstore").stdout == "plain,lookup\n"


@for_each(
    "words, place",
    [("up --root /mn", "dir"), ("up --keys /et", "file"), ("up --etcd-folder /va", "dir"), ("fsck /mn", "dir")],
)
def test_the_shell_completes_names_of_files_and_folders(words: str, place: str) -> None:
    asked = {"_KVSTORE_COMPLETE": "bash_complete", "COMP_WORDS": f"kvstore {words}"}
    asked["COMP_CWORD"] = str(len(words.split()))
    said = CliRunner().invoke(app, env=asked, prog_name="kvstore").stdout
    assert said == f"{place},{words.split()[-1]}\n"
