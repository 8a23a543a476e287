"""Bugs of the capacity of a cluster (gc/PROTOCOL.md, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

from kvstore.meta.usage import Usage
from kvstore.node.usage import WAIT_S, NodeUsage, Reserved
from kvstore_gc.capacity import Accounts, Level
from tests.sim.planting import bug


@bug("full")
def credits_ignore_puts() -> Iterator[None]:
    """A put reserves one byte, however large it is."""

    def reserve(
        self: NodeUsage, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None, wait_s: float = WAIT_S
    ) -> Reserved:
        return real(self, min(size_bytes, 1))

    real = NodeUsage.reserve
    with patch.object(NodeUsage, "reserve", reserve), patch.object(NodeUsage, "wrote", lambda self, size_bytes: None):
        yield


@bug("full")
def credits_ignore_the_level() -> Iterator[None]:
    """Nodes get a whole credit at any level."""
    with patch.object(Level, "spare_bytes", property(lambda self: self.headroom_bytes // 2)):
        with patch.object(Level, "excess_bytes", property(lambda self: 0)):
            yield


@bug("full")
def reports_are_not_counted() -> Iterator[None]:
    """The level stays as it was listed."""

    def reported(self: Accounts, reporter: bytes, usage: Usage) -> None:
        pass

    with patch.object(Accounts, "reported", reported):
        yield


@bug("full")
def nothing_is_evicted() -> Iterator[None]:
    """The root stays full."""
    with patch.object(Level, "excess_bytes", property(lambda self: 0)):
        with patch("kvstore_gc.cycle.Cycle._needed_bytes", lambda self: 0.0):
            yield
