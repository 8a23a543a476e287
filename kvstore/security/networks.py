"""Which addresses only this host can reach."""

from __future__ import annotations


def is_loopback(address: str) -> bool:
    """Whether only this host can reach ``host:port`` or ``unix:path``."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return host in ("localhost", "::1") or host.startswith("127.")
