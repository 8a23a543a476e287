"""Command lines of the programs that commands start, with the same interpreter as this one."""

from __future__ import annotations

import importlib.util
import sys


def kvstore_command(*arguments: str) -> list[str]:
    """The command line that runs ``kvstore``."""
    return [sys.executable, "-m", "kvstore.cli.main", *arguments]


def gc_command(*arguments: str) -> list[str] | None:
    """Returns the command line of the garbage collector, a separate package; None if it is not installed."""
    if importlib.util.find_spec("kvstore_gc") is None:
        return None
    return [sys.executable, "-m", "kvstore_gc", *arguments]
