"""Counts of what a client of workers met; part of its ``stats()``."""

from __future__ import annotations

import threading

CLIENT_COUNTERS = {
    "client_misses_unreachable": "reads answered as a miss because no worker could be reached or answered in time",
    "client_misses_damaged": "reads cut short because bytes changed on the way",
    "client_retries": "calls sent again to another worker",
    "client_set_aside": "times a worker was set aside",
    "client_gets_shared": "reads from memory of a worker of this host, or files that it handed over",
    "client_gets_tcp": "reads over a bulk connection",
    "client_gets_grpc": "reads over gRPC",
    "client_puts_shared": "puts through memory shared with a worker of this host",
    "client_puts_tcp": "puts over a bulk connection",
    "client_puts_grpc": "puts over gRPC",
    "client_bulk_broken": "calls that went on over gRPC because a bulk connection broke",
    "client_bulk_damaged": "reads that went on over gRPC because a chunk that came by another way was not right",
    "client_descriptors_short": "times that file descriptors of this process ran out, and another path was taken",
    "client_namespaces_reopened": "times a worker had to be told a namespace again",
}
"""Every counter with what it counts."""


class ClientCounters:
    """Monotonic counts since the client was made; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(CLIENT_COUNTERS, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Adds to one counter."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counts at one moment."""
        with self._lock:
            return dict(self._counts)
