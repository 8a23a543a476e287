"""Entry point of ``python -m benchmarks``: Ctrl-C is one line from the first import on."""

from __future__ import annotations

import signal
import sys

from kvstore.cli.ctrl_c import ends_at_once

if __name__ == "__main__":
    ends_at_once("kvstore bench")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which kvstore bench blocked
    from benchmarks.command import main
    from benchmarks.interrupts import ending

    with ending():
        sys.exit(main())
