"""A cron job that runs on all hosts by turns: ``python -m tests.cluster.cron PLACE HOSTS EVERY_S COMMAND...``.

Each host runs it. A round begins every so many seconds, on the host whose turn it is by the clock. Nobody takes the
turn of a host that is away, and a long round overlaps the next: collectors must cope with both.
"""

from __future__ import annotations

import subprocess
import sys
import time

TURN_TICK_S = 0.2


def main() -> int:
    place, hosts, every_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    last = int(time.time() / every_s)
    while True:
        turn = int(time.time() / every_s)
        if turn > last:
            last = turn
            if turn % hosts == place:
                subprocess.run(sys.argv[4:], check=False)  # its output goes to our log
        time.sleep(TURN_TICK_S)


if __name__ == "__main__":
    sys.exit(main())
