"""``kvstore demo`` as a real program: its table, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import KVSTORE, PATIENCE_S, SOURCE, descendants, eventually, gone
from tests.kit.programs import ended

pytestmark = pytest.mark.slow


@pytest.fixture
def temporary(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary folder is this test's own."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


def root_of(messages: str) -> Path:
    """The root that a demo has named."""
    found = re.search(r"\S*/kvstore-demo-\w+", messages)
    assert found, messages
    return Path(found[0])


def test_it_ends_with_a_table_and_leaves_nothing(tmp_path: Path, temporary: dict[str, str]) -> None:
    done = ended(*KVSTORE, "demo", "--requests", "30", env=temporary)
    assert done.returncode == 0, done.stderr
    assert "tokens matched" in done.stdout
    assert "wrong bytes: 0" in done.stdout
    assert not root_of(done.stderr).exists() and not list(tmp_path.glob("kvstore-*"))


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)])
def test_a_signal_ends_it_and_nothing_is_left(
    tmp_path: Path, temporary: dict[str, str], number: int, to_all: bool
) -> None:
    """``to_all``: as a terminal does it, which presses Ctrl-C for all programs that the command started."""
    root: Path | None = None
    with subprocess.Popen(
        [*KVSTORE, "demo", "--requests", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=SOURCE,
        env=temporary,
        start_new_session=to_all,
    ) as demo:
        assert demo.stderr is not None
        # Through its messages, so that the cluster runs when the signal comes.
        for line in demo.stderr:
            if "2 workers serve" in line:
                root = root_of(line)
                break
        programs = descendants(demo.pid)
        assert len(programs) == 4, programs  # etcd, two workers and the garbage collector
        if to_all:
            os.killpg(demo.pid, number)
        else:
            demo.send_signal(number)
        assert demo.wait(PATIENCE_S) == 128 + number
        said = demo.stderr.read()
    assert said == ("Aborted!\n" if number == signal.SIGINT else "")
    eventually(lambda: gone(programs), "etcd, workers and the collector end")
    assert root is not None and not root.exists() and not list(tmp_path.glob("kvstore-*"))
