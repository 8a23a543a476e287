"""The stage on which alert conditions are caused: our own programs, and file systems that a test can hang and fill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cli.conftest import PATIENCE_S, SOURCE, eventually

ROOT_BYTES = 192 << 20
DISK_BYTES = 72 << 20
AUDIT_BYTES = 64 << 10


@dataclass
class Program:
    """A server of ours that runs."""

    child: subprocess.Popen[str]
    said: dict[str, str]
    log: Path

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ends it, and waits."""
        self.child.send_signal(number)
        self.child.wait(PATIENCE_S)


class Stage:
    """Starts programs, and ends those that still run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs: list[Program] = []

    def start(self, *arguments: str, module: str = "kvstore.cli.main") -> Program:
        """``kvstore ARGUMENTS``, once it says that it is ready."""
        program = self._begun(arguments[0], module, subprocess.PIPE, *arguments)
        assert program.child.stdout is not None
        line = program.child.stdout.readline()
        assert line.startswith("ready "), f"it said {line!r}: {program.log.read_text()}"
        program.said = dict(pair.split("=", 1) for pair in line.split()[1:])
        return program

    def collect(self, *arguments: str) -> Program:
        """``kvstore-gc ARGUMENTS``, once it serves its metrics; ``said["metrics"]`` is where."""
        program = self._begun("gc", "kvstore_gc", subprocess.DEVNULL, *arguments, "--metrics", "127.0.0.1:0")
        log = program.log
        eventually(lambda: "metrics=" in log.read_text(), f"a collector that serves (see {log})")
        program.said["metrics"] = log.read_text().split("metrics=")[1].split()[0]
        return program

    def _begun(self, name: str, module: str, stdout: int, *arguments: str) -> Program:
        log = self._folder / f"{name}-{len(self._programs)}.log"
        with open(log, "w") as messages:
            child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=stdout,
                stderr=messages,
                text=True,
                cwd=SOURCE,
                env={**os.environ, "PYTHONPATH": "gc:."},
            )
        program = Program(child, {}, log)
        self._programs.append(program)
        return program

    def close(self) -> None:
        """Ends what still runs."""
        for program in self._programs:
            if program.child.poll() is None:
                program.child.kill()
                program.child.wait(PATIENCE_S)
            if program.child.stdout is not None:
                program.child.stdout.close()


@contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of that size at ``folder``."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Hanging:
    """Mounts ``folder`` again at ``mounted`` by a program that can be stopped: a look at it then hangs."""

    def __init__(self, folder: Path, mounted: Path) -> None:
        self.mounted = mounted
        mounted.mkdir()
        self._child = subprocess.Popen(["bindfs", "-f", str(folder), str(mounted)])
        eventually(lambda: os.path.ismount(mounted), "the mount by bindfs")

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Nobody gets an answer meanwhile."""
        self._child.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Unmounts."""
        self._child.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "--lazy", str(self.mounted)], check=False)
        self._child.terminate()
        self._child.wait(PATIENCE_S)


@contextmanager
def filled(folder: Path, left_bytes: int = 0) -> Iterator[None]:
    """A file of somebody else takes all room there but ``left_bytes``."""
    there = os.statvfs(folder)
    path = folder / "of-somebody-else"
    size_bytes = there.f_bavail * there.f_frsize - left_bytes
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
        yield
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A program that is not scheduled meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
