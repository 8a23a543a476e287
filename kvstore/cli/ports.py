"""Ports to listen on, looked at before anything is started: one that is in use ends a command with one line."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from errno import EADDRINUSE, EADDRNOTAVAIL

from kvstore.brief import why
from kvstore.cli.kinds import split
from kvstore.errors import InvalidRequest, Unavailable

EVERY_ADDRESS = ("0.0.0.0", "::")
ADVICE = {
    EADDRINUSE: ": stop the program that does, or choose another port of this host; 0 is any free one",
    EADDRNOTAVAIL: ": this host has no such address; give one that it has, or 0.0.0.0 for all of them",
}


def check_ports(listening: Iterable[tuple[str, str | None]]) -> None:
    """Checks the options of one command, each with its address. Port 0, a unix socket and None can always be had.

    Raises InvalidRequest where two of them are one port, which only the program that starts last would find, and
    Unavailable where one is in use.
    """
    wanted = [(option, each) for option, each in listening if each is not None and _has_port(each)]
    for at, (option, address) in enumerate(wanted):
        for other, another in wanted[:at]:
            if _is_one_port(address, another):
                raise InvalidRequest(
                    f"{other} {another} and {option} {address} are one port: choose another one for one of them; "
                    "0 is any free one"
                )
    for option, address in wanted:
        check_free(option, [address])


def check_free(option: str, addresses: Iterable[str | None]) -> None:
    """Raises Unavailable for an address that cannot be listened on now. Port 0, a unix socket and None always can."""
    for address in addresses:
        if address is None or not _has_port(address):
            continue
        host, port = split(address)
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, for a port just left
                tried.bind(place)
        except OSError as cause:
            advice = ADVICE.get(cause.errno or 0, "")
            raise Unavailable(f"cannot listen on {option} {address} ({why(cause)}){advice}") from cause


def _has_port(address: str) -> bool:
    return not address.startswith("unix:") and split(address)[1] != 0


def _is_one_port(one: str, other: str) -> bool:
    (one_host, one_port), (other_host, other_port) = split(one), split(other)
    if one_port != other_port:
        return False
    one_at, other_at = _number(one_host), _number(other_host)
    return one_at == other_at or one_at in EVERY_ADDRESS or other_at in EVERY_ADDRESS


def _number(host: str) -> str:
    """The numeric address of a host; the host itself where it has none, which ``check_free`` reports."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host
