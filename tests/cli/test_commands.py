"""Commands over a root in this process: what they print, their exit codes, how they refuse, and tables."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.cli.app import COMMANDS, MODULES
from kvstore.cli.output import print_table
from kvstore.core.validate import shown
from tests.cli.conftest import Run, parsed
from tests.kit.cases import for_each
from tests.kit.programs import ended

LAYOUT = kvstore.Layout(layers=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=4)
TOKENS = list(range(10))


@pytest.fixture
def root(tmp_root: Path) -> Iterator[str]:
    """A root with two chunks of namespace ``model``, and an empty namespace of another tenant."""
    url = str(tmp_root / "root")
    with kvstore.open(url) as store:
        cache = store.namespace("model", LAYOUT, fingerprint="weights-1")
        assert cache.put(TOKENS, np.ones(LAYOUT.shape(10), np.float16)).chunks_written == 2
        store.namespace("theirs", LAYOUT, tenant="alice")
    yield url


def chunk_files(root: str) -> list[Path]:
    return [path for path in Path(root, "chunks").rglob("*") if path.is_file()]


@for_each("command", [name for name in MODULES if name != "bench"])
def test_command_help_has_examples(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout and f"kvstore {command}" in result.stdout


def test_help_lists_every_command_by_subject(run: Run) -> None:
    listed = run("--help").stdout
    for subject, names in COMMANDS.items():
        section = listed.partition(f"\n{subject}:\n")[2].partition("\n\n")[0]
        assert all(f"  {name} " in section for name in names)


@for_each("package", ["click", "rich"])
def test_a_missing_package_is_a_sentence(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from kvstore.cli.main import main; main()"
    done = ended(sys.executable, "-c", program)
    assert done.returncode == 2
    assert done.stderr == f"kvstore: the command line needs {package}: pip install 'kvstore-llm[server]'\n"


@for_each(
    "arguments, said",
    [
        (("ls", "--connect", ","), "which store? give --root URL"),
        (("ls", "--root", "/missing/folder"), "/missing/folder does not exist"),
        (("ls", "--root", "/x", "--connect", "h:1"), "two ways to the same store"),
        (("ls", "--workers", "--root", "ROOT"), "give --etcd ENDPOINTS"),
        (("ls", "--root", "ROOT", "--etcd-ca", "file"), "give --etcd ENDPOINTS as well"),
        (("match", "other", "1,2", "--root", "ROOT"), "no namespace 'other'; there are: model, theirs"),
        (("match", "theirs", "1,2", "--root", "ROOT"), "tenant 'alice' with fingerprint '': give --tenant"),
        (("clear", "model", "--fingerprint", "x", "--yes", "--root", "ROOT"), "with fingerprint 'weights-1'"),
        (("match", "model", "1,x,3", "--root", "ROOT"), "'x'"),
        (("match", "model", "1,,2", "--root", "ROOT"), "not token ids"),
        (("match", "model", "9" * 5000, "--root", "ROOT"), "not token ids"),
        (("match", "model", "1,-3", "--root", "ROOT"), "item 1 is -3"),
        (("match", "model", "--root", "ROOT"), "no tokens are given"),
        (("match", "model", "--tokens-file", "/missing", "--root", "ROOT"), "from '/missing': No such file"),
        (("clear", "model", "--root", "ROOT", "--ignore-pins"), "give --yes"),
        (("fsck", "/"), "is not a kvstore root"),
        (("fsck", "ROOT", "--rate", "0"), "--rate is 0"),
        (("stats", "--root", "/tmp"), "is not a kvstore root"),
        (("replay", "/missing.jsonl"), "cannot read the trace"),
        (("worker", "--root", "ROOT", "--listen", "127.0.0.1:0"), "give --etcd ENDPOINTS"),
        (("up", "--root", "ROOT", "--disk", "d:1GiB"), "disk without memory: chunks of a local disk"),
        (("up", "--root", "ROOT", "--etcd", "h:1", "--etcd-folder", "f"), "give one of them"),
        (("up", "--root", "ROOT", "--etcd", "h:1", "--etcd-port", "2379"), "give one of them"),
        (("up", "--root", "ROOT", "--events-query", "127.0.0.1:8090"), "give --events ENDPOINT too"),
        (("up", "--root", "ROOT", "--events", "tcp://0.0.0.0:5557"), "give a CURVE certificate"),
        (("up", "--root", "ROOT", "--events", "garbage"), "is no endpoint"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    run: Run, root: str, arguments: tuple[str, ...], said: str
) -> None:
    result = run(*(root if each == "ROOT" else each for each in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith(f"kvstore {arguments[0]}: ") and said in result.stderr


def test_a_bug_of_ours_is_not_a_failed_check(run: Run, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(kvstore.Store, "namespaces", broken)
    result = run("ls", "--root", root)
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("kvstore ls: internal error, please report it: ZeroDivisionError: bug\n")


@for_each(
    "arguments, said",
    [
        (("up",), "which root? give --root URL (a folder, file:///path, s3://...), or set KVSTORE_ROOT"),
        (("match",), "Missing argument 'NAME'"),
        (("up", "--root", "x", "--listen", "nonsense"), "write HOST:PORT"),
        (("up", "--root", "x", "--drain", "soon"), "write 30s"),
        (("up", "--root", "x", "--workers", "0"), "--workers"),
        (("nonsense",), "No such command"),
        (("token", "nonsense"), "No such command"),
        (("ls", "--rot", "x"), "Did you mean one of: '--root', '--root-id'?"),
    ],
)
def test_wrong_use_is_exit_code_2(run: Run, arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_ls_counts_what_each_namespace_has(run: Run, root: str) -> None:
    found = {each["name"]: each for each in parsed(run("ls", "--root", root, "--json"))["namespaces"]}
    stored = chunk_files(root)
    assert found["model"]["chunks"] == len(stored) == 2
    assert found["model"]["bytes"] == sum(path.stat().st_size for path in stored)
    assert found["model"]["layout"] == LAYOUT.to_dict()
    assert found["model"]["fingerprint"] == "weights-1"
    assert (found["theirs"]["tenant"], found["theirs"]["chunks"]) == ("alice", 0)
    table = run("ls", "--root", root).stdout
    assert "model" in table and "2x2x4x1x8 float16" in table and "alice" in table


def test_stats_of_a_root(run: Run, root: str) -> None:
    found = parsed(run("stats", "--root", root, "--json"))
    assert len(bytes.fromhex(found["root"])) == 16
    assert found["version"] == 1 and found["free_bytes"] > 0
    assert re.search(r"free bytes +.*iB", run("stats", "--root", root).output)


def test_fsck_finds_a_damaged_chunk_and_repairs_it(run: Run, root: str) -> None:
    clean = parsed(run("fsck", root, "--json"))
    assert (clean["clean"], clean["chunks"], clean["problems"]) == (True, 2, 0)
    victim = chunk_files(root)[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)

    found = run("fsck", root, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["findings"][0]["kind"] == "damaged"
    assert run("fsck", root, "--quick").exit_code == 0  # it was told not to look at the KV

    repaired = run("fsck", root, "--repair")
    assert repaired.exit_code == 1
    assert "damaged" in repaired.stdout and "[quarantined]" in repaired.stdout and "[removed]" in repaired.stdout
    assert parsed(run("fsck", root, "--json"))["clean"] is True


def test_ls_says_that_chunks_are_of_a_namespace_without_a_record(run: Run, root: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(root, damaged)
    for record in (damaged / "namespaces").iterdir():
        record.write_text("{broken")
    result = run("ls", "--root", str(damaged), "--json")
    assert (result.exit_code, parsed(result)["namespaces"]) == (0, [])
    assert re.fullmatch(r"[1-9]\d* chunks are of namespaces that no record describes: .*fsck.*", result.stderr.strip())


@for_each("arguments", [("ls", "--root"), ("stats", "--root"), ("fsck",), ("check-root",)])
def test_a_mistyped_root_is_an_error_and_no_new_folder(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, str(tmp_path / "typo"))
    assert result.exit_code == 2 and "does not exist: is the path right" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_fsck_tells_leftovers_from_damage_by_its_exit_code(run: Run, root: str) -> None:
    staged = Path(root) / "staging" / ("dd" * 16) / "1.part"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"of a writer that died")
    os.utime(staged, (1_600_000_000, 1_600_000_000))
    found = run("fsck", root, "--json")
    said = json.loads(found.stdout)
    assert found.exit_code == 0 and said["clean"] and said["problems"] == 0 and said["findings"] == []
    assert said["leftovers_count"] == len(said["leftovers"]) >= 1
    assert {each["kind"] for each in said["leftovers"]} == {"orphan_staging"}
    text = run("fsck", root)
    assert text.exit_code == 0 and "leftovers (not damage):\norphan_staging" in text.stdout
    assert run("fsck", root, "--repair").exit_code == 0
    assert not staged.exists()


def test_a_table_shows_control_characters_and_no_terminal_obeys_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("label",), [("canary\x1b[2J\x1b]0;title\x07\x9b1m\ud800",)])
    said = capsys.readouterr().out
    assert r"canary\x1b[2J\x1b]0;title\x07\x9b1m\ud800" in said and "\x1b" not in said
    assert shown("Zoë, 模型") == "Zoë, 模型" and shown("two\nlines\r") == r"two\nlines\r"
