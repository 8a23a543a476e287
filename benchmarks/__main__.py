"""Entry point of ``python -m benchmarks``."""

from __future__ import annotations

import sys

from kvstore.cli.signals import aborts, exits_on_sigterm

if __name__ == "__main__":
    with aborts(), exits_on_sigterm():
        from benchmarks.cli import main

        sys.exit(main())
