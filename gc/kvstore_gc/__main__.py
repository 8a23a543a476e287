"""Entry point of ``kvstore-gc``; separate from the command so that a missing package is a sentence, not a traceback."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

NEEDED = ("click", "rich", "prometheus_client")


def main() -> NoReturn:
    """Runs the command and exits: 0 done, 1 it could not finish, 2 wrong use or could not run."""
    missing = [name.replace("_", "-") for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"kvstore-gc: it needs {' and '.join(missing)}: pip install 'kvstore[server]'", file=sys.stderr)
        sys.exit(2)
    from kvstore_gc.cli import command

    command(prog_name="kvstore-gc")
    sys.exit(0)


if __name__ == "__main__":
    main()
