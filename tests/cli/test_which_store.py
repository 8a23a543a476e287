"""How a command learns which store is meant: options, the environment, or one line that says what to give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvstore
from kvstore.cli.app import app
from kvstore_gc.cli import command as collector
from tests.cli.conftest import Run, parsed
from tests.kit.cases import for_each
from tests.kit.workers import serving

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


@for_each(
    "arguments, said",
    [
        (("ls",), "which store? give --root URL, --connect HOST:PORT[,HOST:PORT] or --etcd ENDPOINTS, or set"),
        *(((name,), "which store?") for name in ("stats", "health", "ops")),
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
    "arguments, said", [(("--once",), "which root? give --root URL"), (("--root", "x", "--once"), "x does not exist")]
)
def test_so_does_the_collector(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(collector, list(arguments), prog_name="kvstore-gc")
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_command_says_its_version(run: Run) -> None:
    assert run("-v").output == run("--version").output == f"kvstore, version {kvstore.__version__}\n"


@for_each("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands(shell: str) -> None:
    script = CliRunner().invoke(app, env={"_KVSTORE_COMPLETE": f"{shell}_source"}, prog_name="kvstore").stdout
    assert "_KVSTORE_COMPLETE" in script and "kvstore" in script
    asked = {"_KVSTORE_COMPLETE": "bash_complete", "COMP_WORDS": "kvstore prefe", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, env=asked, prog_name="kvstore").stdout == "plain,prefetch\n"
