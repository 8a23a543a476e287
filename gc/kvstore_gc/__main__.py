"""Entry point of ``kvstore-gc``; separate from the command so that a missing package is a sentence, not a traceback."""

from __future__ import annotations

from kvstore.cli.main import run

NEEDED = ("click", "rich", "prometheus_client")


def main() -> None:
    """Runs the command and exits: 0 done, 1 it could not finish what it had to, 2 wrong use or could not run, 130
    Ctrl-C.
    """
    run("kvstore-gc", "it", NEEDED, "kvstore_gc.cli", "command")


if __name__ == "__main__":
    main()
