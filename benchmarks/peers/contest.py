"""One run: all contenders on one workload, round by round, each read verified."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.contender import Entry
from benchmarks.peers.environments import NotReady, python_of
from benchmarks.peers.seat import Failed, Seat
from benchmarks.peers.workload import Memory, Workload
from benchmarks.rounds import Taken

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
