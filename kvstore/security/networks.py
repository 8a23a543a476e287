"""Addresses as text, ``host:port``, and which of them only this host can reach."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """True if only this host can reach ``host:port`` or ``unix:path``."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # also 127.0.0.1.example.org, a name that may resolve to any host


def joined(host: str, port: int) -> str:
    """Returns the ``host:port`` of a host without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
