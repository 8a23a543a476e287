"""The examples of README and docs/: Python blocks are run, commands are parsed."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import SOURCE, Running
from tests.deploy.commands import understood
from tests.kit.cases import for_each
from tests.kit.programs import ended

PAGES = [SOURCE / "README.md", *sorted((SOURCE / "docs").glob("*.md"))]
PYTHON = {page: re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL) for page in PAGES}
COMMAND_LINES = [
    (page, line)
    for page in PAGES
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if re.match(r"kvstore(-gc)? ", line)
]


def test_there_are_examples() -> None:
    assert PYTHON[SOURCE / "README.md"]
    assert len([block for blocks in PYTHON.values() for block in blocks]) >= 5
    assert len(COMMAND_LINES) >= 15


@pytest.mark.slow
@for_each("page", [page for page in PAGES if PYTHON[page]])
def test_the_python_blocks_run_one_after_the_other(page: Path, up: Running, module_root: Path, tmp_path: Path) -> None:
    """On real roots and workers, in place of the addresses that the page makes up."""
    one, two = up.grpc.split(",")
    places = {
        '"10.0.0.7:7070"': repr(one),
        '"10.0.0.8:7070"': repr(two),
        '"127.0.0.1:7070"': repr(one),
        '"127.0.0.1:7071"': repr(two),
        '"10.0.0.5:2379"': repr(up.etcd),
    }
    for block in PYTHON[page]:
        # A block that names etcd or a worker is about the cluster; the others are about one host alone.
        folder = module_root / "root" if "10.0.0." in block else tmp_path / "alone"
        program = block.replace('"/mnt/kv"', repr(str(folder))).replace('"/tmp/kv-python"', repr(str(folder)))
        for made_up, real in places.items():
            program = program.replace(made_up, real)
        done = ended(sys.executable, "-c", program, env={**os.environ, "PYTHONPATH": str(SOURCE)})
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert done.stderr == "", f"{block}\n{done.stderr}"


@for_each("page, line", COMMAND_LINES)
def test_the_commands_are_understood(page: Path, line: str) -> None:
    understood(shlex.split(line, comments=True), page.name)
