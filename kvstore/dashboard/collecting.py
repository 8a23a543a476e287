"""The plan of garbage collection, made by the collector as a separate program that changes nothing.

The collector is never imported: the store does not depend on it, and a plan over a large root takes memory and time
that a separate process gives back.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from kvstore.errors import Unavailable
from kvstore.parsing import parse_json

PLAN_S_MAX = 300.0
EXAMPLES = 25
STDERR_CHARACTERS_MAX = 400


class PlanSource:
    """Runs ``kvstore-gc --once --dry-run --json``. ``command`` is its command line; None if there is no collector."""

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = None if command is None else [*command, "--once", "--dry-run", "--json"]
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._closed = False

    def plan(self) -> dict[str, Any]:
        """Returns the summary that ``kvstore-gc --dry-run --json`` prints. Raises Unavailable if there is none."""
        if self._command is None:
            raise Unavailable("the garbage collector is not installed here, so there is no plan: install kvstore-gc")
        child = self._start(self._command)
        try:
            said, complaint = child.communicate(timeout=PLAN_S_MAX)
        except subprocess.TimeoutExpired as cause:
            raise Unavailable(
                f"the collector made no plan within {PLAN_S_MAX:g} s: check that the root answers"
            ) from cause
        finally:
            self._end(child)
        try:
            found = parse_json(said)
        except ValueError as cause:
            why = " ".join(complaint.split())[-STDERR_CHARACTERS_MAX:] or f"exit code {child.returncode}"
            raise Unavailable(f"the collector could not make a plan: {why}") from cause
        if not isinstance(found, dict):
            raise Unavailable("the collector printed no plan: check that its version is the dashboard's")
        return found

    def close(self) -> None:
        """Ends a running plan. Idempotent."""
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._closed:
                raise Unavailable("the dashboard is ending")
            try:
                self._child = subprocess.Popen(
                    [*command, "--examples", str(EXAMPLES)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            except OSError as cause:
                raise Unavailable(f"the collector could not be started: {cause}") from cause
            return self._child

    def _end(self, child: subprocess.Popen[str]) -> None:
        with self._lock:
            self._child = None
        if child.poll() is None:
            child.kill()
            child.communicate()
