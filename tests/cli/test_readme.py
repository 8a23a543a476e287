"""Every snippet of the README: Python blocks are run, commands are parsed, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvstore.cli.app import COMMANDS, app
from tests.cli.conftest import PATIENCE_S, SOURCE, Running

README = (SOURCE / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMAND_LINES = [line for block in SHELL for line in block.splitlines() if line.startswith("kvstore ")]


def test_the_readme_has_snippets() -> None:
    assert len(PYTHON) >= 4
    assert len(COMMAND_LINES) >= 5


@pytest.mark.slow
def test_the_python_blocks_run_one_after_the_other(up: Running, module_root: Path) -> None:
    """On real roots and workers, in place of the addresses that the README makes up."""
    one, two = up.grpc.split(",")
    places = {
        '"10.0.0.7:7070"': repr(one),
        '"10.0.0.8:7070"': repr(two),
        '"10.0.0.5:2379"': repr(up.etcd),
    }
    for block in PYTHON:
        # A block that names etcd or a worker is about the cluster; the others are about one host alone.
        folder = module_root / ("root" if "10.0.0." in block else "alone")
        program = block.replace('"/mnt/kv"', repr(str(folder)))
        for made_up, real in places.items():
            program = program.replace(made_up, real)
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=SOURCE,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert done.stderr == "", f"{block}\n{done.stderr}"


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_the_commands_are_understood(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)[1:]
    with click.Context(app, info_name="kvstore") as context:
        command = app.get_command(context, name)
        assert command is not None, f"no command {name}"
        command.make_context(name, arguments, parent=context)  # raises for an option that is not there


def test_the_table_of_commands_is_complete() -> None:
    table = README.split("## Commands")[1].split("## Limits")[0]
    for command in COMMANDS:
        assert re.search(rf"`(kvstore )?{command}\b", table), command


def test_links_lead_to_files() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert targets
    for target in targets:
        assert (SOURCE / target).is_file(), target
