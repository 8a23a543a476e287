"""Runs the tests of one mutant in a separate pytest process, and judges the result."""

from __future__ import annotations

import enum
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.building import Libraries
from tests.mutants.mutant import LIBRARY_VARIABLE, NAME_VARIABLE, NOTES_VARIABLE, Mutant
from tests.mutants.planters import Native, Unplantable

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).parent / "hook"
TEST_S = 120
"""A test that takes longer does not end: without its mutant it takes seconds."""
RUN_S = 400
PATIENCE_S = "30"
"""Tests wait so long (tests/kit/patience.py) for what a mutant may keep from happening: that fails, and is no hang."""
FAILED = 1
"""What pytest exits with where tests failed; 2 to 5 are errors of its own."""


class Verdict(enum.Enum):
    """The outcome of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    UNPLANTED = "NOT PLANTED"
    BROKEN = "NO VERDICT"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on one mutant, with the test that caught it or the reason why none did."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of a pytest run: its exit code (None: it was stopped), its notes and its output."""

    code: int | None
    notes: list[dict[str, object]]
    output: str

    def noted(self, what: str) -> list[str]:
        """All notes of one kind."""
        return [str(note[what]) for note in self.notes if what in note]


def arguments(tests: Sequence[str]) -> list[str]:
    """Pytest's arguments for tests as the catalogue names them."""
    return [f"tests/{each}" if each.partition("::")[0].endswith(".py") else each for each in tests]


def run_pytest(tests: Sequence[str], environment: Mapping[str, str], seconds: float) -> Ran:
    """Runs tests until the first one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
    command += [f"--timeout={TEST_S}", *arguments(tests)]
    with tempfile.TemporaryDirectory(prefix="kvstore-mutant-") as folder:
        notes = Path(folder) / "notes"
        search = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": search, NOTES_VARIABLE: str(notes), **environment}
        with (Path(folder) / "output").open("w+b") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            code: int | None
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        lines = notes.read_text().splitlines() if notes.exists() else []
    return Ran(code, [json.loads(line) for line in lines], text)


def run_mutant(mutant: Mutant, libraries: Libraries) -> Outcome:
    """Plants one mutant and runs its tests."""
    began_s = time.monotonic()

    def outcome(verdict: Verdict, why: str) -> Outcome:
        return Outcome(mutant, verdict, time.monotonic() - began_s, why)

    environment = {NAME_VARIABLE: mutant.name, "KVSTORE_TEST_PATIENCE_S": PATIENCE_S}
    if not mutant.native:
        environment["KVSTORE_NATIVE"] = "0"
    if isinstance(mutant.planter, Native):
        try:
            environment[LIBRARY_VARIABLE] = str(libraries.build(mutant.planter, mutant.name))
        except Unplantable as error:
            return outcome(Verdict.UNPLANTED, str(error))
    return outcome(*judged(mutant, run_pytest(mutant.tests, environment, RUN_S)))


def judged(mutant: Mutant, ran: Ran) -> tuple[Verdict, str]:
    """Returns the verdict of a run on a mutant, and the reason."""
    unplantable, planted, failed = (ran.noted(what) for what in ("unplantable", "planted", "failed"))
    if unplantable:
        return Verdict.UNPLANTED, unplantable[0]
    if not planted:
        return Verdict.UNPLANTED, f"nothing imported {', '.join(mutant.planter.modules)}; {_tail(ran)}"
    late = ran.code is None or any(note.get("late") for note in ran.notes)
    if late:
        return Verdict.BROKEN, failed[0] if failed else f"not done in {RUN_S} s"
    if ran.code == FAILED and failed:
        return Verdict.CAUGHT, failed[0]
    if ran.code == 0 and ran.noted("passed"):
        return Verdict.SURVIVED, f"passed: {' '.join(mutant.tests)}"
    return Verdict.BROKEN, f"pytest exited with {ran.code}: {_tail(ran)}"


def _tail(ran: Ran) -> str:
    return " | ".join(line.strip() for line in ran.output.splitlines()[-4:] if line.strip())
