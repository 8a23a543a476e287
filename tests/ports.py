"""Ports for servers that have to be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a port on which nobody listens.

    It is below those that the kernel gives to clients, and to servers that ask for any: none of these, of which a run
    of the tests has thousands, takes it between this call and the server's start.
    """
    below = int(_GIVEN.read_text().split()[0]) if _GIVEN.exists() else 49152
    while True:
        port = random.SystemRandom().randrange(10_000, below)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return port
