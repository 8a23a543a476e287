"""Programs that a command starts: workers, the garbage collector. They end with it, even when it is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from kvstore.errors import Unavailable

START_S = 60.0
STOP_S = 20.0
MESSAGES_BYTES_MAX = 4096

# Asks the kernel for a signal at the parent's death, between fork and exec: code that runs in a forked child of a
# program with threads may deadlock, so this is a program of its own.  The parent may have died before it could ask,
# so it looks.
_LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
os.getppid() == int(sys.argv[2]) or os._exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Program:
    """One child. Start it from the main thread: the kernel takes the death of the starting thread for the parent's.

    Its messages go to ``messages`` where given (kept until somebody asks why it failed), else to our standard error.
    """

    def __init__(self, name: str, command: Sequence[str], *, messages: Path | None = None) -> None:
        self.name = name
        self.command = list(command)
        self.started_s = 0.0
        self._messages = messages
        self._child: subprocess.Popen[str] | None = None
        self._said: dict[str, str] | None = None
        self._heard = threading.Event()
        self._asked = False
        self._reader: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs or was never started."""
        return None if self._child is None else self._child.poll()

    @property
    def pid(self) -> int | None:
        """Its pid; None before the first start."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts it. Raises Unavailable where it cannot be."""
        command = self.command
        if sys.platform == "linux":
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(int(signal.SIGTERM)), str(os.getpid())]
            command = [*launcher, *command]
        self._heard.clear()
        self._asked = False
        self._said = None
        self.started_s = time.monotonic()
        try:
            with ExitStack() as files:
                messages = files.enter_context(open(self._messages, "ab")) if self._messages else None
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for us, who end children in the right order
                )
        except OSError as cause:
            raise Unavailable(f"{self.name} could not be started: {cause}") from cause
        assert self._child.stdout is not None
        self._reader = threading.Thread(
            target=self._listen, args=(self._child.stdout,), name=f"kvstore {self.name}", daemon=True
        )
        self._reader.start()

    def wait_ready(self, given_up: Callable[[], bool] = lambda: False, timeout_s: float = START_S) -> dict[str, str]:
        """What its ``ready`` line says, by key. Raises Unavailable where it ended, or was not ready in time."""
        deadline_s = self.started_s + timeout_s
        while not self._heard.wait(0.05):
            if given_up():
                raise Unavailable(f"{self.name} was ended before it was ready")
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self.name} was not ready within {timeout_s:g} s{self._because()}")
        if self._said is None:
            assert self._child is not None
            self._child.wait()
            raise Unavailable(f"{self.name} ended with exit code {self._child.returncode}{self._because()}")
        return self._said

    def ask_to_stop(self) -> None:
        """Sends SIGTERM, once: a second one tells a worker to stop without finishing what it accepted."""
        if self._child is not None and not self._asked:
            self._asked = True
            self._child.send_signal(signal.SIGTERM)  # does nothing once it is reaped

    def kill(self) -> None:
        """Sends SIGKILL; idempotent."""
        if self._child is not None:
            self._child.kill()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Ends it, by force after ``timeout_s``, and waits until it is gone. Idempotent."""
        if self._child is None:
            return
        self.ask_to_stop()
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._child.wait()
        if self._reader is not None:
            self._reader.join(1.0)

    def _listen(self, lines: IO[str]) -> None:
        """Reads its standard output to the end, so that it never blocks on it; the first ``ready`` line counts."""
        with lines:
            for line in lines:
                word, *pairs = line.split() or [""]
                if word == "ready" and self._said is None:
                    self._said = dict(pair.partition("=")[::2] for pair in pairs)
                    self._heard.set()
        self._heard.set()

    def _because(self) -> str:
        if self._messages is None:
            return ": its messages are above"
        try:
            with open(self._messages, "rb") as file:
                file.seek(max(0, self._messages.stat().st_size - MESSAGES_BYTES_MAX))
                said = file.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return f": {said.splitlines()[-1]}" if said else ""


def stop_all(programs: Sequence[Program], timeout_s: float = STOP_S) -> None:
    """Ends several at once, by force after ``timeout_s``."""
    for program in programs:
        program.ask_to_stop()
    deadline_s = time.monotonic() + timeout_s
    for program in programs:
        program.stop(max(0.1, deadline_s - time.monotonic()))


def kill_all(programs: Sequence[Program]) -> None:
    """Ends several by force, without waiting."""
    for program in programs:
        program.kill()


def kvstore_command(*arguments: str) -> list[str]:
    """The command line that runs ``kvstore`` with the same interpreter as this one."""
    return [sys.executable, "-m", "kvstore.cli.main", *arguments]


def gc_command(*arguments: str) -> list[str] | None:
    """The command line that runs the garbage collector, a package of its own; None where it is not installed."""
    if importlib.util.find_spec("kvstore_gc") is None:
        return None
    return [sys.executable, "-m", "kvstore_gc", *arguments]
