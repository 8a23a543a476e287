"""Entry point of ``kvstore``, and of any program like it: a missing package is a sentence and no traceback."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

from kvstore.cli.signals import aborts

NEEDED = ("click", "rich")


def main() -> NoReturn:
    """Runs the command line and exits: 0 done, 1 the check failed, 2 wrong use or could not run, 130 Ctrl-C."""
    run("kvstore", "the command line", NEEDED, "kvstore.cli.app", "app")


def run(program: str, what: str, needed: tuple[str, ...], module: str, command: str) -> NoReturn:
    """Runs a command of click, which is imported once the packages it needs were found. Exits as ``main``."""
    missing = [name.replace("_", "-") for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{program}: {what} needs {' and '.join(missing)}: pip install 'kvstore-llm[server]'", file=sys.stderr)
        sys.exit(2)
    with aborts():
        getattr(importlib.import_module(module), command)(prog_name=program)
    sys.exit(0)


if __name__ == "__main__":
    main()
