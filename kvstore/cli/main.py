"""Entry point of ``kvstore``; separate from the commands so that a missing package is a sentence, not a traceback."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

NEEDED = ("click", "rich")


def main() -> NoReturn:
    """Runs the command line and exits: 0 done, 1 the check failed, 2 wrong use or could not run."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"kvstore: the command line needs {' and '.join(missing)}: pip install 'kvstore[server]'", file=sys.stderr
        )
        sys.exit(2)
    from kvstore.cli.app import app

    app(prog_name="kvstore")
    sys.exit(0)


if __name__ == "__main__":
    main()
