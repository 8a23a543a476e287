"""Ports for servers that have to be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a port on which nobody listens.

    It is none of those that the kernel gives to clients, and to servers that ask for any: none of these, of which a run
    of the tests has thousands, takes it between this call and the server's start.
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
