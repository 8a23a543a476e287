"""Entry point of ``kvstore``, and of any program like it.

Separate from the commands so that a missing package, or Ctrl-C while they are imported, is a sentence and no traceback.
"""

from __future__ import annotations

import sys

from kvstore.cli.ctrl_c import ends_at_once

TYPE_CHECKING = False  # typing is slow to import, and Ctrl-C is a traceback until ``ends_at_once``
if TYPE_CHECKING:
    from typing import NoReturn

NEEDED = ("click", "rich")


def main() -> NoReturn:
    """Runs the command line and exits: 0 done, 1 the check failed, 2 wrong use or could not run, 130 Ctrl-C."""
    run("kvstore", "the command line", NEEDED, "kvstore.cli.app", "app")


def run(program: str, what: str, needed: tuple[str, ...], module: str, command: str) -> NoReturn:
    """Runs a command of click, which is imported once the packages it needs were found. Exits as ``main``."""
    ends_at_once(program)
    import importlib.util

    missing = [name.replace("_", "-") for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{program}: {what} needs {' and '.join(missing)}: pip install 'kvstore-llm[server]'", file=sys.stderr)
        sys.exit(2)
    getattr(importlib.import_module(module), command)(prog_name=program)
    sys.exit(0)


if __name__ == "__main__":
    main()
