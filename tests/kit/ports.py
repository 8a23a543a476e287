"""Ports for servers that have to be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a port on which nobody listens.

    The kernel gives no port of that range by itself. So no other connection of the tests, which make thousands, takes
    it before the server starts.
    """
    first, last = map(int, _GIVEN.read_text().split()) if _GIVEN.exists() else (49_152, 65_535)
    choice = [*range(10_000, first), *range(last + 1, 65_536)] or [0]
    while True:
        port = random.SystemRandom().choice(choice)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            found: int = tried.getsockname()[1]
            return found
