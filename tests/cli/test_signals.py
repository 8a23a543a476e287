"""Signals: servers end once they are asked to, work that ends by itself is cleaned up."""

from __future__ import annotations

import os
import signal
import sys
from typing import cast

import click
import pytest

from kvstore.cli.app import MODULES, app
from kvstore.cli.signals import Stopper, exits_on_sigterm
from tests.cli.conftest import Run
from tests.kit.programs import ended


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # to this, the main, thread: it is handled before kill returns


def test_sigterm_in_work_cleans_up_and_exits() -> None:
    before, log = signal.getsignal(signal.SIGTERM), list[str]()
    with pytest.raises(SystemExit, match="143"), exits_on_sigterm():
        try:
            interrupt()
        finally:
            interrupt()  # a second one does not cut the cleanup
            log.append("cleaned")
    assert log == ["cleaned"] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("command", [name for name in MODULES if name != "token"])
def test_command_after_ctrl_c_exits_130(command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    found = app.get_command(cast(click.Context, None), command)
    monkeypatch.setattr(found, "callback", interrupted)
    monkeypatch.setattr(found, "params", [])
    result = run(command)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Aborted!\n")


def test_server_after_ctrl_c_raises_at_its_end() -> None:
    with pytest.raises(KeyboardInterrupt):
        with Stopper() as stopper:
            signal.raise_signal(signal.SIGINT)
            assert stopper.wait(0.0)


def test_second_signal_ends_a_server_at_once() -> None:
    script = """
import signal, time
from kvstore.cli import signals
signals.SAME_REQUEST_S = 0.0
with signals.Stopper(at_once=lambda: print("at once", flush=True)) as stopper:
    signal.raise_signal(signal.SIGTERM)
    assert stopper.wait()
    signal.raise_signal(signal.SIGTERM)
    print("went on")
"""
    done = ended(sys.executable, "-c", script)
    assert (done.returncode, done.stdout) == (143, "at once\n"), done.stderr


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper() as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopper.asked
    finally:
        signal.signal(signal.SIGHUP, before)
