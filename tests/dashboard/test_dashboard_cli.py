"""``kvstore dashboard`` and ``kvstore up --dashboard`` as programs."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli.app import app
from tests.cli.conftest import descendants, eventually, gone, serving
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S

HERE = ("dashboard", "--root", "/nowhere", "--etcd", "127.0.0.1:1")


@for_each(
    "arguments, said",
    [
        (("dashboard", "--root", "/nowhere"), "--etcd ENDPOINTS"),
        ((*HERE, "--listen", "0.0.0.0:0"), "or --insecure"),
        ((*HERE, "--listen", "10.0.0.7:8080", "--https-cert", "c", "--https-key", "k"), "--access"),
        ((*HERE, "--https-cert", "c"), "go together"),
        ((*HERE, "--https-cert", "/no/cert", "--https-key", "/no/key"), "/no/"),
        ((*HERE, "--access", "/no/file"), "/no/file"),
    ],
)
def test_what_would_be_unsafe_or_make_no_sense_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, list(arguments), prog_name="kvstore")
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def asked(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_up_serves_it_and_ends_it(tmp_root: Path) -> None:
    arguments = ["--root", str(tmp_root / "root"), "--listen", "127.0.0.1:0", "--dashboard", "127.0.0.1:0"]
    with serving(tmp_root, "up", *arguments) as running:
        url = running.said["dashboard"]
        programs = descendants(running.child.pid)
        assert any("dashboard" in command for command in programs.values())
        eventually(lambda: asked(url, "api/overview")["workers"]["answering"] == 1, "the worker is shown")
        assert asked(url, "api/workers")["workers"][0]["address"] == running.grpc
        eventually(lambda: asked(url, "api/capacity")["plan"] is not None, "the collector says what it would take")
        assert running.end() == 0
        assert gone(programs)
