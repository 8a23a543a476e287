"""Messages of the servers: events on standard error, one a line."""

from __future__ import annotations

import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str) -> None:
    """Sends everything of this package to standard error; of others only warnings."""
    line = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    line.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[line], force=True)
    logging.getLogger("kvstore").setLevel(level.upper())
