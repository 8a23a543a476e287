"""Two ranks of SGLang in processes of their own, as the test's process sees them. What they do is in ``seat.py``.

What SGLang's controllers agree upon ends only when both ranks take part, so both are told before either is waited for.
A pair serves many tests, because it takes a process seconds to import torch and SGLang.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.engines.sglang.seat import ANSWER_S, RANKS, serve
from tests.kit.patience import PATIENCE_S


class Pair:
    """Two ranks. They are started when they are first needed, and anew after one of them failed."""

    def __init__(self) -> None:
        self._lines: list[Connection] = []
        self._started: list[Any] = []
        self._folders = ExitStack()

    def start(self) -> None:
        """Starts the processes, and does not wait for them. Idempotent."""
        if self._started:
            return
        folder = self._folders.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-test-ranks-"))
        context = multiprocessing.get_context("spawn")
        for number in range(RANKS):
            ours, theirs = context.Pipe()
            started = context.Process(target=serve, args=(number, f"{folder}/rendezvous", theirs), daemon=True)
            started.start()
            theirs.close()  # or a process that ends would not be seen
            self._lines.append(ours)
            self._started.append(started)

    def stop(self) -> None:
        """Kills both. Idempotent."""
        for started in self._started:
            started.kill()
            started.join(PATIENCE_S)
        for line in self._lines:
            line.close()
        self._started, self._lines = [], []
        self._folders.close()

    def both(self, act: str, *args: Any, **told: Any) -> list[Any]:
        """Calls this method of each rank's Seat, and returns what they return."""
        return self.each(act, [args] * RANKS, **told)

    def each(self, act: str, args: Sequence[tuple[Any, ...]], **told: Any) -> list[Any]:
        """Like ``both``, with other arguments for each rank."""
        return self._answers(act, dict(enumerate(args)), told)

    def one(self, number: int, act: str, *args: Any, **told: Any) -> Any:
        """Calls a method of one rank that needs no other rank."""
        return self._answers(act, {number: args}, told)[0]

    def _answers(self, act: str, args: dict[int, tuple[Any, ...]], told: dict[str, Any]) -> list[Any]:
        try:
            return self._answered(act, args, told)
        except BaseException:
            self.stop()  # one rank may wait for the other for ever, and a later act would get these answers
            raise

    def _answered(self, act: str, args: dict[int, tuple[Any, ...]], told: dict[str, Any]) -> list[Any]:
        self.start()
        for number, each in args.items():
            with suppress(OSError):  # it has ended, which is said below
                self._lines[number].send((act, each, told))
        answers: dict[int, Any] = {}
        while len(answers) < len(args):
            missing = {self._lines[number]: number for number in args if number not in answers}
            ready = [line for line in wait([*missing], ANSWER_S) if isinstance(line, Connection)]
            failures = [] if ready else [f"ranks {[*missing.values()]} did not end {act!r} within {ANSWER_S:g} s"]
            for line in ready:
                try:
                    answers[missing[line]], why = line.recv()
                except (EOFError, OSError):
                    why = "its process ended"
                failures += [f"rank {missing[line]}: {why}"] if why else []
            if failures:
                raise AssertionError("\n".join(failures))
        return [answers[number] for number in args]


@contextmanager
def pair() -> Iterator[Pair]:
    """Two ranks, killed at the end."""
    made = Pair()
    try:
        made.start()
        yield made
    finally:
        made.stop()


@contextmanager
def seated(ranks: Pair, kind: str, *extras: dict[str, Any], **told: Any) -> Iterator[Pair]:
    """The ranks with our backend attached. ``extras`` has the settings of both, or those of each."""
    each = extras if len(extras) == RANKS else extras * RANKS
    ranks.each("sit", [(kind, extra) for extra in each], **told)
    try:
        yield ranks
    except BaseException:
        ranks.stop()  # what an act left undone would be in the next test's way
        raise
    ranks.both("leave")
