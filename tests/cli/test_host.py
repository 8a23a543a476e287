"""Programs beside the workers of ``kvstore up``: when one that died is started again."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.cli.signals import Stopper
from kvstore.cli.up import Supervisor
from kvstore.cli.worker import WorkerOptions
from kvstore.core.clock import RandomIds
from kvstore.core.process import Program
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.usage import Capacity
from kvstore.root.identity import create_or_open
from kvstore.root.open import open_root
from tests.kit.patience import PATIENCE_S


def told(name: str, order: Path) -> Program:
    """A program that says in a file when it was told to end."""
    code = (
        "import signal, sys\n"
        "def end(*_):\n"
        f"    open({str(order)!r}, 'a').write({name!r} + chr(10))\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    program = Program(name, [sys.executable, "-c", code])
    program.start()
    program.wait_ready()
    return program


def test_what_runs_beside_the_workers_ends_after_them(tmp_path: Path) -> None:
    order = tmp_path / "order"
    programs = [told(name, order) for name in ("worker 0", "gc")]
    with Stopper() as stopper:
        # Neither a root nor etcd is needed to end them.
        served = Supervisor(cast(WorkerOptions, None), 1.0, stopper, programs)
        served._others.append(programs[1])
        served.stop()
    assert order.read_text().split("\n") == ["worker 0", "gc", ""]


@pytest.mark.parametrize("credit_bytes", [None, 0])
def test_up_waits_until_a_collector_has_listed_the_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, credit_bytes: int | None
) -> None:
    counted_s = 0.2 if credit_bytes is None else PATIENCE_S
    with closing(open_root(str(tmp_path / "root"))) as root:
        identity = create_or_open(root, RandomIds(), create=True)
    meta, keys = MemoryMetadata(), Keys(identity.root)
    meta.put(keys.gc_capacity, Capacity(1, credit_bytes=credit_bytes).to_json())
    typed = os.path.relpath(tmp_path / "root")
    place = SimpleNamespace(
        root=typed, root_options=SimpleNamespace(read=dict), etcd=SimpleNamespace(open=lambda: meta)
    )
    with Stopper() as stopper:
        up = Supervisor(cast(WorkerOptions, SimpleNamespace(cluster=place)), 1.0, stopper, [], counted_s)
        up._await_count()
    assert ("up.uncounted" in caplog.text) == (credit_bytes is None)
