"""Programs that this one starts: workers, the collector, etcd. They end with it, even when it is killed.

And what forked children must let go of.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from kvstore.errors import Unavailable

START_S = 60.0
FORGOTTEN_BY_CHILDREN: WeakSet[Any] = WeakSet()
"""The locks of this process: its forked children must not keep them. Each has a method ``forget``."""


def _forget_all() -> None:
    for lock in list(FORGOTTEN_BY_CHILDREN):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


STOP_S = 20.0
MESSAGES_BYTES_MAX = 4096

# Asks the kernel for a signal when the thread that starts the child dies. It is a program of its own, because code that
# runs between fork and exec in a child of a process with threads may deadlock. It also checks that the parent lives: it
# may have died before the child could ask.
_LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
os.getppid() == int(sys.argv[2]) or os._exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


def gc_command(*arguments: str, module: str = "kvstore_gc") -> list[str] | None:
    """Returns the command line of the garbage collector, a separate package; None if it cannot be run here.

    The module ``kvstore_gc.host`` collects a folder of one host, and needs the packages of the library alone.
    """
    if not sys.executable or importlib.util.find_spec("kvstore_gc") is None:
        return None
    return [sys.executable, "-m", module, *arguments]


def kvstore_command(*arguments: str) -> list[str]:
    """Returns the command line that runs ``kvstore``, with the same interpreter as this one."""
    return [sys.executable, "-m", "kvstore.cli.main", *arguments]


class Program:
    """One child. On Linux it gets the signal ``dies_by`` when this process dies; elsewhere call ``stop``.

    Its messages go to the file ``messages``, where given, else to our standard error.  One that ``speaks`` prints a
    ``ready`` line on its standard output; of any other, that goes to ``messages`` too. With ``on_line`` it does not
    speak: each line of its output is given to that, in a thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        messages: Path | None = None,
        environment: Mapping[str, str] | None = None,
        speaks: bool = True,
        dies_by: signal.Signals = signal.SIGTERM,
        on_line: Callable[[str], object] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.started_s = 0.0
        self._messages = messages
        self._environment = environment
        self._speaks = speaks
        self._dies_by = dies_by
        self._on_line = on_line
        self._child: subprocess.Popen[str] | None = None
        self._said: dict[str, str] | None = None
        self._heard = threading.Event()
        self._ended = threading.Event()
        self._asked = False
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """True while it runs."""
        return self._child is not None and not self._ended.is_set()

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs or was never started."""
        return None if self._child is None or self.running else self._child.returncode

    @property
    def pid(self) -> int | None:
        """Its pid; None before the first start."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts it. Raises Unavailable where it cannot be."""
        command = self.command
        if sys.platform == "linux" and sys.executable:
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(int(self._dies_by)), str(os.getpid())]
            command = [*launcher, *command]
        self._heard, self._ended = threading.Event(), threading.Event()
        self._asked = False
        self._said = None
        self.started_s = time.monotonic()
        started, failures = threading.Event(), list[OSError]()
        # The kernel takes the death of the thread that starts a child for the parent's: this one lives as long as it.
        self._thread = threading.Thread(
            target=self._run, args=(command, started, failures), name=f"kvstore {self.name}", daemon=True
        )
        self._thread.start()
        started.wait()
        for cause in failures:
            raise Unavailable(f"{self.name} could not be started: {cause}") from cause

    def wait_ready(self, given_up: Callable[[], bool] = lambda: False, timeout_s: float = START_S) -> dict[str, str]:
        """The pairs of its ``ready`` line. Raises Unavailable where it ended, or was not ready in time."""
        deadline_s = self.started_s + timeout_s
        while not self._heard.wait(0.05):
            if given_up():
                raise Unavailable(f"{self.name} was ended before it was ready")
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self.name} was not ready within {timeout_s:g} s{self._because()}")
        if self._said is None:
            self._ended.wait()
            raise Unavailable(f"{self.name} ended with exit code {self.exit_code}{self._because()}")
        return self._said

    def wait_ended(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` for its end; True if it ended."""
        return self._ended.wait(timeout_s)

    def ask_to_stop(self) -> None:
        """Sends SIGTERM, once: a second one makes a worker stop without finishing what it accepted."""
        if self._child is not None and not self._asked:
            self._asked = True
            self._child.send_signal(signal.SIGTERM)  # does nothing once it is reaped
            self._child.send_signal(signal.SIGCONT)  # one that was stopped would not hear of it

    def kill(self) -> None:
        """Sends SIGKILL; idempotent."""
        if self._child is not None:
            self._child.kill()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Ends it, by force after ``timeout_s``, and waits until it is gone. Idempotent."""
        if self._child is None:
            return
        self.ask_to_stop()
        if not self._ended.wait(timeout_s):
            self.kill()
            self._ended.wait()

    def _run(self, command: list[str], started: threading.Event, failures: list[OSError]) -> None:
        try:
            with ExitStack() as files:
                messages = files.enter_context(open(self._messages, "ab")) if self._messages else None
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if self._speaks or self._on_line is not None else messages,
                    stderr=messages if self._on_line is None else subprocess.STDOUT,
                    env=self._environment,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for us, who end children in the right order
                )
        except OSError as cause:
            failures.append(cause)
            self._ended.set()
            return
        finally:
            started.set()
        if self._child.stdout is not None:
            # Apart: a grandchild that has inherited its standard output must not hide that it ended.
            threading.Thread(target=self._listen, args=(self._child.stdout,), daemon=True).start()
        self._child.wait()
        self._ended.set()

    def _listen(self, lines: IO[str]) -> None:
        """Reads its standard output to the end, so that it never blocks on it; the first ``ready`` line counts."""
        with lines:
            for line in lines:
                if self._on_line is not None:
                    self._on_line(line.rstrip())
                    continue
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
    """Ends several together, by force after ``timeout_s``."""
    for program in programs:
        program.ask_to_stop()
    deadline_s = time.monotonic() + timeout_s
    for program in programs:
        program.stop(max(0.1, deadline_s - time.monotonic()))


def kill_all(programs: Sequence[Program]) -> None:
    """Ends several by force, without waiting."""
    for program in programs:
        program.kill()
