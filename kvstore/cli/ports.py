"""Ports to listen on, looked at before anything is started: one that is in use ends a command with one line."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from kvstore.cli.kinds import split
from kvstore.errors import Unavailable


def check_free(option: str, addresses: Iterable[str | None]) -> None:
    """Raises Unavailable for an address that cannot be listened on now. Port 0, a unix socket and None always can."""
    for address in addresses:
        if address is None or address.startswith("unix:") or not split(address)[1]:
            continue
        host, port = split(address)
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, for a port just left
                tried.bind(place)
        except OSError as cause:
            raise Unavailable(
                f"cannot listen on {option} {address} ({cause.strerror or cause}): stop the program that does, "
                "or choose another port of this host; 0 is any free one"
            ) from cause
