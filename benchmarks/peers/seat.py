"""The harness's end of the pipe: one contender's process, asked with a deadline, and ended with all it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.contender import Entry
from benchmarks.peers.workload import Memory, Workload
from benchmarks.rounds import Taken

SOURCE = Path(__file__).resolve().parents[2]
START_S = 120.0
ASK_S = 120.0
STOP_S = 20.0
SAID_BYTES = 400


class Failed(Exception):
    """A contender could not carry out its order; the text says why."""


class Seat:
    """One contender's process. Raises Failed from every call that it cannot answer in time."""

    def __init__(self, entry: Entry, python: Path, environ: Mapping[str, str], folder: Path, memory: Memory) -> None:
        self.entry = entry
        self.reads: tuple[str, ...] = ()
        folder.mkdir(parents=True)
        self._folder = folder / "store"
        self._folder.mkdir()
        self._said = folder / "said"
        ours, theirs = socket.socketpair()
        self._pipe = ours
        self._lines = ours.makefile("rw")
        with theirs, self._said.open("wb") as said:
            self._child = subprocess.Popen(
                [str(python), "-m", "benchmarks.peers.child", str(theirs.fileno()), str(memory.descriptor)],
                cwd=SOURCE,
                env={**os.environ, **environ, "PYTHONPATH": str(SOURCE)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(theirs.fileno(), memory.descriptor),
                start_new_session=True,  # so that servers it started can be ended with it
            )

    def open(self, workload: Workload, threads: int) -> None:
        """Makes the contender."""
        answer = self._ask(
            {
                "do": "open",
                "place": self.entry.place,
                "workload": asdict(workload),
                "folder": str(self._folder),
                "threads": threads,
            },
            START_S,
        )
        self.reads = tuple(answer["reads"])

    def ask(self, what: str, turn: int) -> Taken:
        """The seconds that the contender took for one of put, get, view, prepare, clear."""
        answer = self._ask({"do": what, "turn": turn}, ASK_S)
        return Taken(answer["taken_s"], answer["cpu_s"])

    def close(self) -> None:
        """Ends the process and whatever it started. Idempotent."""
        try:
            self._lines.close()
        except OSError:
            pass  # it could not be told; it is ended below
        self._pipe.close()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._child.wait()

    def _ask(self, asked: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        self._pipe.settimeout(deadline_s)
        try:
            self._lines.write(json.dumps(asked) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            raise Failed(f"{asked['do']} took more than {deadline_s:g} s") from None
        except (OSError, ValueError) as error:
            raise Failed(f"{asked['do']}: {error}{self._last_words()}") from error
        if not line:
            raise Failed(f"its process ended during {asked['do']}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(f"{asked['do']}: {answer['failed']}")
        return answer

    def _last_words(self) -> str:
        said = self._said.read_bytes()[-SAID_BYTES:].decode(errors="replace").strip().splitlines()
        return f": {said[-1]}" if said else ""
