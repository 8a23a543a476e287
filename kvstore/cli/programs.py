"""Command lines of the programs that commands start, with the same interpreter as this one."""

from __future__ import annotations

import sys


def kvstore_command(*arguments: str) -> list[str]:
    """The command line that runs ``kvstore``."""
    return [sys.executable, "-m", "kvstore.cli.main", *arguments]
