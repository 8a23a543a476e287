"""A machine: a process tree with its own network, mounts, shared memory and host name, switched on and off as a whole.

It is process 1 of namespaces (``init.py``) that this side tells what to run. Switching it off is a SIGKILL to that
process: the kernel does the rest, as a power cut would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.etcd import eventually

INIT = Path(__file__).with_name("init.py")
BOOT_S = 10.0
COMMAND_S = 60.0
STOP_S = 45.0
AGAIN_S = 1.0
POLL_S = 0.02
SAID_MAX = 8000


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    log: str


class Machine:
    """One machine. ``logs`` is a folder outside of it. Nothing runs before ``boot``."""

    def __init__(self, name: str, logs: Path) -> None:
        self.name = name
        self.logs = logs
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._runs_count = 0

    @property
    def is_on(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """Its process 1, as seen from outside."""
        assert self.is_on, f"{self.name} is off"
        return self._pid

    def boot(self, disks_of: Machine | None = None) -> None:
        """Switches it on; it sees the mounts of ``disks_of`` as they are now, which never sees its own."""
        assert not self.is_on, f"{self.name} is on"
        self.logs.mkdir(parents=True, exist_ok=True)
        inside = ["nsenter", f"--mount=/proc/{disks_of.pid}/ns/mnt", "--"] if disks_of else []
        spaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--propagation=private", "--mount-proc"]
        # It dies with us, and nobody's Ctrl-C reaches it before we have had it.
        with open(self.logs / "init.log", "ab") as log:
            self._process = subprocess.Popen(
                [*inside, "unshare", *spaces, "--fork", "--kill-child=KILL", "--", sys.executable, "-I", str(INIT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        above = self._process.pid
        children = Path(f"/proc/{above}/task/{above}/children")
        eventually(lambda: bool(children.read_text().split()), patience_s=BOOT_S)
        self._pid = int(children.read_text().split()[0])
        self.run(["hostname", self.name])
        self.ip("link", "set", "lo", "up")

    def off(self) -> None:
        """Cuts its power: everything in it is gone at the return. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait(STOP_S)

    def ip(self, *arguments: str, check: bool = True) -> None:
        """``ip`` with these arguments, in its network."""
        command = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *arguments]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_S)
        assert not check or not ended.returncode, f"{self.name}: ip {' '.join(arguments)}: {ended.stderr}"

    # Services and commands

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        again_s: float | None = AGAIN_S,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Starts a service, which is started again after each of its ends unless ``again_s`` is None; its pid there."""
        log = str(self.logs / name)
        return int(
            self._tell("start", name, argv=list(argv), log=log, environment=dict(environment or {}), again_s=again_s)
        )

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a service a signal, if it runs."""
        self._tell("signal", name, number=int(number))

    def stop(self, name: str, wait_s: float = STOP_S) -> int:
        """Ends a service with SIGTERM, for good; its exit code. Raises TimeoutError."""
        self._tell("retire", name)
        self.send(name, signal.SIGTERM)
        return self._wait(name, wait_s)

    def run(
        self, argv: Sequence[str], wait_s: float = COMMAND_S, environment: Mapping[str, str] | None = None
    ) -> Ended:
        """Runs a command to its end. Raises TimeoutError after ``wait_s``, having killed it."""
        self._runs_count += 1
        name = f"run-{os.path.basename(argv[0])}-{self._runs_count}"
        self.start(name, argv, again_s=None, environment=environment)
        try:
            code = self._wait(name, wait_s)
        except TimeoutError:
            self.send(name, signal.SIGKILL)
            raise
        out, log = (self.logs / f"{name}.out", self.logs / f"{name}.log")
        ended = Ended(code, out.read_text(), log.read_text())
        if not code:
            for each in (out, log):
                each.unlink()
        return ended

    def must(self, argv: Sequence[str], wait_s: float = COMMAND_S, environment: Mapping[str, str] | None = None) -> str:
        """Runs a command that has to succeed; returns its output."""
        ended = self.run(argv, wait_s, environment)
        assert ended.code == 0, f"{self.name}: {' '.join(argv)}: {ended.code}: {ended.log or ended.out}"
        return ended.out

    def _wait(self, name: str, wait_s: float) -> int:
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            state = self._tell("look", name)
            if not state["pid"]:
                return int(state["codes"][-1])
            time.sleep(POLL_S)
        raise TimeoutError(f"{self.name}: {name} did not end within {wait_s:g} s: {self.said(name)}")

    def said(self, name: str) -> str:
        """The end of a service's log."""
        return (self.logs / f"{name}.log").read_text()[-SAID_MAX:]

    def _tell(self, do: str, name: str, **details: object) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, f"{self.name} is off"
        process.stdin.write(json.dumps({"do": do, "name": name, **details}).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"{self.name} has died: {(self.logs / 'init.log').read_text()[-2000:]}"
        return json.loads(answer)
