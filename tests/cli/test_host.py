"""Programs beside the workers of ``kvstore up``: when one that died is started again."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.children import Program
from kvstore.cli import supervisor
from kvstore.cli.signals import Stopper
from kvstore.cli.supervisor import AGAIN_S, _Other, _start_later
from kvstore.cli.worker import WorkerOptions
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.usage import Capacity
from kvstore.root.identity import create_or_open
from kvstore.root.open import open_root
from kvstore.sources import RandomIds
from tests.kit.patience import PATIENCE_S


class Clock:
    """What ``time.monotonic`` says."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(supervisor, "time", made)
    return made


class Dying(Program):
    """A program that is dead whenever somebody looks."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("gc", [sys.executable])
        self._clock = clock
        self.starts = list[float]()
        self.start()

    def start(self) -> None:
        self.started_s = self._clock.monotonic()
        self.starts.append(self.started_s)

    @property
    def exit_code(self) -> int | None:
        return -9


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
        served = supervisor.Host(cast(WorkerOptions, None), 1.0, stopper, programs)
        served._others.append(_Other(programs[1]))
        served.stop()
    assert order.read_text().split("\n") == ["worker 0", "gc", ""]


def test_a_program_that_was_stopped_hears_that_it_is_to_end(tmp_path: Path) -> None:
    order = tmp_path / "order"
    program = told("gc", order)
    assert program.pid is not None
    os.kill(program.pid, signal.SIGSTOP)
    program.ask_to_stop()
    try:
        assert program.wait_ended(PATIENCE_S)
    finally:
        program.kill()
    assert program.exit_code == 0 and order.read_text() == "gc\n"


@pytest.mark.parametrize("credit_bytes", [None, 0])
def test_up_waits_until_a_collector_has_listed_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, credit_bytes: int | None
) -> None:
    monkeypatch.setattr(supervisor, "COUNTED_S", 0.2 if credit_bytes is None else PATIENCE_S)
    with closing(open_root(str(tmp_path / "root"))) as root:
        identity = create_or_open(root, RandomIds(), create=True)
    meta, keys = MemoryMeta(), Keys(identity.root)
    meta.put(keys.gc_capacity, Capacity(1, credit_bytes=credit_bytes).to_json())
    typed = os.path.relpath(tmp_path / "root")
    place = SimpleNamespace(
        root=typed, root_options=SimpleNamespace(read=dict), etcd=SimpleNamespace(open=lambda: meta)
    )
    with Stopper() as stopper:
        up = supervisor.Host(cast(WorkerOptions, SimpleNamespace(cluster=place)), 1.0, stopper, [])
        up._await_count()
    assert ("up.uncounted" in caplog.text) == (credit_bytes is None)


def pauses(other: _Other, program: Dying, clock: Clock, lived_s: float, count: int) -> list[float]:
    """Kills the program each time it has lived so long; returns how long it was gone, within half a second."""
    found = []
    for _ in range(count):
        clock.now_s += lived_s
        died_s, before = clock.now_s, len(program.starts)
        while len(program.starts) == before:
            _start_later(other)
            clock.now_s += 0.5
        found.append(program.starts[-1] - died_s)
    return found


def test_a_killed_program_is_back_a_second_later(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    program = Dying(clock)
    other = _Other(program)
    with caplog.at_level(logging.ERROR, "kvstore"):
        found = pauses(other, program, clock, 2.0, 9)
    assert found == [AGAIN_S] * 9
    said = [record.message for record in caplog.records]
    assert said[0] == "up.gc_ended exit_code=-9: starting it again in 1 s" and len(said) == 9, "once for each death"
