"""A process that checks every pin in force all the time, even if its owner is dead: ``python -m tests.chaos.auditor``.

Exits with 3 at the first broken one.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from tests.chaos.journal import COUNTS, VIOLATION, Journal
from tests.chaos.pins import LivePins

PAUSE_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--shard-bits", type=int, required=True)
    parser.add_argument("--journals", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    given = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    pins = LivePins(given.root, given.shard_bits, given.journals)
    journal, counts = Journal(given.journal), {"audited_chunks": 0, "audits_refused": 0}
    while not ended.wait(PAUSE_S):
        for pin in pins.in_force():
            try:
                broken = pins.broken(pin)
            except OSError:
                counts["audits_refused"] += 1  # a distributed file system may say ESTALE: nothing is shown by that
                continue
            counts["audited_chunks"] += pin.chunks_count
            if broken is None:
                continue
            details = {"pin": pin.id, "number": pin.number, "index": broken.index, "name": broken.name}
            journal.note(VIOLATION, what=f"pinned chunk {broken.why}", **details)
            return 3
        journal.note(COUNTS, **counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
