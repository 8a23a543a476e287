"""The command and its results: each benchmark is listed, documented and found; figures are shown with all they need."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli
from benchmarks.harness import machine, report
from benchmarks.harness.options import Options
from benchmarks.harness.result import Plot, Result, Table, save
from tests.kit.patience import PATIENCE_S, eventually

SOURCE = Path(__file__).parents[2]
TABLE = Table(
    "Speeds & sizes",
    ("workers", "write", "read", "path"),
    [[1, 0.5, 1.25, "shared"], [32, 1234.5, None, "tcp"]],
    "as fast as that",
    Plot("workers", ("write", "read"), "path", "GiB/s", log_x=True),
)


def result(**changed: Any) -> Result:
    about = {**machine.describe(), "commit": "abc123", "quiet": False, "load_before": 7.5}
    whole = Result("throughput", "it is fast", ("warm page cache",), about, [TABLE], ["cold: no device"], 12.0)
    return replace(whole, **changed)


def members_of(group: int) -> int:
    """Programs of a process group that have begun: each has a command line."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            is_member = int(stat.read_text().rpartition(")")[2].split()[2]) == group
            found += is_member and bool(stat.with_name("cmdline").read_bytes())
        except OSError:
            continue
    return found


def test_list_names_each_benchmark_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    rows = re.findall(r"^\| `([a-z0-9][a-z0-9-]*)` \|", (SOURCE / "benchmarks" / "README.md").read_text(), re.M)
    assert listed == [*cli.BENCHMARKS] == rows


def test_each_benchmark_function_exists() -> None:
    for one in cli.BENCHMARKS.values():
        source = (SOURCE / "benchmarks" / f"{one.module.replace('.', '/')}.py").read_text()
        assert f"\ndef {one.function}(" in source
        assert one.is_program or "\ndef add_arguments(" in source


def test_the_page_has_all_that_a_figure_needs(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    save(result(), folder)
    assert report.main([str(folder)]) == 0
    page = (tmp_path / "RESULTS.md").read_text()
    for words in ("it is fast", "abc123", "warm page cache", "SHARED", "cold: no device", "as fast as that", "1,234"):
        assert words in page
    (plot,) = (folder / "plots").iterdir()
    assert plot.name == "throughput-speeds-sizes.svg"


def test_the_command_prints_and_saves_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def run(options: Options, arguments: Any) -> Result:
        return result(skipped=[])

    monkeypatch.setattr(cli.Benchmark, "call", lambda self: run)
    assert cli.main(["run", "throughput", "--json", "--save", str(tmp_path)]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "throughput.json").read_text())
    assert printed["tables"][0]["rows"][0] == [1, 0.5, 1.25, "shared"] == kept["tables"][0]["rows"][0]
    assert cli.main(["throughput"]) == 0
    assert "shared with other work (load 7.5" in capsys.readouterr().out


def test_bench_after_ctrl_c_exits_130_and_leaves_nothing() -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli.main", "bench", "throughput", "--quick"],
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as in a terminal
    )
    try:
        assert running.stderr is not None
        assert "throughput (1 of 1)" in running.stderr.readline()
        eventually(lambda: members_of(running.pid) >= 3, "its programs begin")
        os.killpg(running.pid, signal.SIGINT)
        _, messages = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == 130 and "Aborted!" in messages
        eventually(lambda: not members_of(running.pid), "nothing is left")
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
