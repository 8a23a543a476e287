"""One run: all contenders on one workload, round by round, in a process each, every read verified."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.competitors.contender import Entry, Memory, Workload
from benchmarks.competitors.environments import SOURCE, NotReady, python_of
from benchmarks.harness.machine import Taken

START_S = 120.0
ASK_S = 120.0
STOP_S = 20.0
OUTPUT_BYTES = 400


class Failed(Exception):
    """A contender could not carry out its order; the text gives the reason."""


class Seat:
    """One contender's process. Raises Failed from every call that it cannot answer in time."""

    def __init__(self, entry: Entry, python: Path, environ: Mapping[str, str], folder: Path, memory: Memory) -> None:
        self.entry = entry
        self.reads: tuple[str, ...] = ()
        folder.mkdir(parents=True)
        self._folder = folder / "store"
        self._folder.mkdir()
        self._output = folder / "output"
        ours, theirs = socket.socketpair()
        self._pipe = ours
        self._lines = ours.makefile("rw")
        with theirs, self._output.open("wb") as output:
            self._child = subprocess.Popen(
                [str(python), "-m", "benchmarks.competitors.child", str(theirs.fileno()), str(memory.descriptor)],
                cwd=SOURCE,
                env={**os.environ, **environ, "PYTHONPATH": str(SOURCE)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
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
            pass  # it could not be closed; the process is ended below
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
        lines = self._output.read_bytes()[-OUTPUT_BYTES:].decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


PUT = "put"


@dataclass
class Contest:
    """The outcome: seconds by contender, operation and round; and why the others have no figures."""

    workload: Workload
    threads: int
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cpu_seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Processor seconds in the same way, servers included."""
    failures: dict[str, str] = field(default_factory=dict)
    """By contender, why it was left out or came no further."""

    def note(self, name: str, taken: Mapping[str, Taken]) -> None:
        """Takes down a counted turn."""
        for operation, each in taken.items():
            self.seconds.setdefault(name, {}).setdefault(operation, []).append(each.wall_s)
            self.cpu_seconds.setdefault(name, {}).setdefault(operation, []).append(each.cpu_s)

    def fail(self, name: str, reason: str) -> None:
        """Takes a contender out: half a row would mislead."""
        self.seconds.pop(name, None)
        self.cpu_seconds.pop(name, None)
        self.failures[name] = reason


def play(
    workload: Workload,
    entries: Sequence[Entry],
    folder: Path,
    *,
    threads: int,
    rounds: int,
    report: Callable[[str], None],
) -> Contest:
    """Runs ``rounds`` rounds after one to warm up. After a long prompt each clears its store at once, to save room."""
    contest = Contest(workload, threads)
    memory = Memory.of(workload.size_bytes)
    seats: dict[str, Seat] = {}
    try:
        for entry in entries:
            report(f"{workload.name}: starting {entry.title}")
            _start(entry, seats, contest, folder, memory)
        turn = 0
        for number in range(rounds + 1):
            report(f"{workload.name}: round {number} of {rounds}" if number else f"{workload.name}: warming up")
            first = number % max(1, len(seats))
            for name in [*seats][first:] + [*seats][:first]:
                turn += 1
                try:
                    taken = _take_turn(seats[name], memory, turn, apart=workload.long_prompt)
                except Failed as failure:
                    report(f"{workload.name}: {name} failed: {failure}")
                    contest.fail(name, f"round {number}: {failure}")
                    seats.pop(name).close()
                    continue
                if number:
                    contest.note(name, taken)
    finally:
        for seat in seats.values():
            seat.close()
        memory.close()
        for entry in entries:
            shutil.rmtree(folder / entry.name, ignore_errors=True)
    return contest


def _start(entry: Entry, seats: dict[str, Seat], contest: Contest, folder: Path, memory: Memory) -> None:
    try:
        python, environ = python_of(entry.environment)
    except NotReady as error:
        contest.fail(entry.name, str(error))
        return
    seat = Seat(entry, python, environ, folder / entry.name, memory)
    try:
        seat.open(contest.workload, contest.threads)
    except Failed as failure:
        seat.close()
        contest.fail(entry.name, str(failure))
    except BaseException:
        seat.close()
        raise
    else:
        seats[entry.name] = seat


def _take_turn(seat: Seat, memory: Memory, turn: int, *, apart: bool) -> Mapping[str, Taken]:
    """Returns the seconds by operation. Raises Failed, also if it read other bytes than it was given."""
    seat.ask("prepare", turn)
    memory.renew(turn)
    memory.wipe()
    seat.ask("clear", turn)
    taken = {PUT: seat.ask(PUT, turn)}
    for way in seat.reads:
        memory.wipe()
        taken[way] = seat.ask(way, turn)
        if not memory.is_right():
            raise Failed(f"{way} gave wrong bytes")
    if apart:
        seat.ask("clear", turn)
    return taken
