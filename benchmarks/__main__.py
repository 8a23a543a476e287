"""Entry point of ``python -m benchmarks``: Ctrl-C is one line from the first import on."""

from __future__ import annotations

import signal
import sys

from benchmarks.interrupts import PROGRAM, ending
from kvstore.cli.ctrl_c import ends_at_once

if __name__ == "__main__":
    ends_at_once(PROGRAM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which kvstore bench blocked
    from benchmarks.command import main

    with ending():
        sys.exit(main())
