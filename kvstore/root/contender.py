"""A second process on a mounted file system, for the probes of ``check-root`` that need a rival.

Run as ``python -m kvstore.root.contender FOLDER``. Reads one JSON object per line, answers each with one, and ends when
its input does, so that it never outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from kvstore.format.places import Name
from kvstore.parsing import parse_json
from kvstore.root.posix import PosixRoot

ANSWER_S = 30.0
TURN_S = 0.002
AT_FULL_SPEED = 1_000
"""Renames into one folder after which each further one waits ``STEP_S`` longer."""
STEP_S = 1e-5
STEP_MAX_S = 0.02


class Contender:
    """The rival, seen from the process that checks. ``folder`` is the scratch folder's path for the rival."""

    def __init__(self, folder: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvstore.root.contender", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that checks, which ends this one
            # Pass the search path on: the package may be importable here only because of it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )

    def send(self, what: str, **parameters: Any) -> None:
        """Starts an action; ``receive`` returns its outcome."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"what": what, **parameters}) + "\n")
        self._child.stdin.flush()

    def receive(self) -> Any:
        """Returns the outcome of the action that was sent. Raises OSError if it failed, or if the rival is gone."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise OSError("the second process ended")
        answer = parse_json(line)
        if "error" in answer:
            raise OSError(answer["code"], answer["error"])
        return answer["outcome"]

    def ask(self, what: str, **parameters: Any) -> Any:
        """Sends an action and returns its outcome."""
        self.send(what, **parameters)
        return self.receive()

    def close(self) -> None:
        """Ends the process, by force if it hangs on the mount."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
        if self._child.stdout is not None:
            self._child.stdout.close()


def create_names(folder: str, prefix: str, names_count: int, at_s: float, me: str) -> list[int]:
    """Creates many names with O_EXCL, starting at wall time ``at_s``; returns those that this process created."""
    return _compete(at_s, names_count, lambda number: _create(f"{folder}/{prefix}{number}"))


def prepare_links(folder: str, prefix: str, names_count: int, me: str) -> None:
    """Makes the files that ``link_names`` links, one for each name.

    GlusterFS allows about a hundred links to one file, and the store never makes more than two.
    """
    for number in range(names_count):
        _create(f"{folder}/{prefix}{me}-{number}")


def link_names(folder: str, prefix: str, names_count: int, at_s: float, me: str) -> list[int]:
    """Links files of its own to many names; returns the names that this process won."""
    return _compete(
        at_s, names_count, lambda number: os.link(f"{folder}/{prefix}{me}-{number}", f"{folder}/{prefix}{number}")
    )


def rename_into(folder: str, fence: str, stop: str, me: str) -> int:
    """Renames files into folder ``fence`` as fast as it can until ``stop`` exists; returns how many got in.

    It slows down while one folder stays: on a busy machine the other process could never empty it otherwise.
    """
    count = in_a_row = 0
    source = f"{folder}/{fence}-source-{me}"
    while not os.path.exists(f"{folder}/{stop}"):
        try:
            if not os.path.exists(source):
                _create(source)
            os.rename(source, f"{folder}/{fence}/{me}{count}")
        except OSError:
            in_a_row = 0
            continue  # the folder is gone at the moment: the fence holds
        count += 1
        in_a_row += 1
        if in_a_row > AT_FULL_SPEED:
            time.sleep(min((in_a_row - AT_FULL_SPEED) * STEP_S, STEP_MAX_S))
    return count


def wait_for(folder: str, name: str, present: bool, limit_s: float) -> float:
    """Returns the seconds until a root finds a name (or does not); -1 if that took longer than ``limit_s``."""
    root, start_s = PosixRoot(folder), time.monotonic()
    while (root.stat(Name(name)) is not None) != present:
        if time.monotonic() - start_s > limit_s:
            return -1.0
        time.sleep(0.0005)
    return time.monotonic() - start_s


def read_hex(folder: str, name: str) -> str:
    """Returns a small file's content in hexadecimal digits."""
    with open(f"{folder}/{name}", "rb") as file:
        return file.read().hex()


def _create(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _compete(at_s: float, names_count: int, take: Callable[[int], object]) -> list[int]:
    won = []
    for number in range(names_count):
        # Each name has a start time of its own: otherwise the process that begins first takes all names before the
        # other looks.
        while time.time() < at_s + number * TURN_S:
            pass
        try:
            take(number)
        except FileExistsError:
            continue
        won.append(number)
    return won


_DOES: dict[str, Callable[..., Any]] = {
    "create": create_names,
    "prepare_links": prepare_links,
    "link": link_names,
    "rename_into": rename_into,
    "wait_for": wait_for,
    "read": read_hex,
}


def _serve(folder: str) -> None:
    for line in sys.stdin:
        parameters = parse_json(line)
        try:
            answer: dict[str, Any] = {"outcome": _DOES[parameters.pop("what")](folder, **parameters)}
        except OSError as error:
            answer = {"error": str(error), "code": error.errno or 0}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
