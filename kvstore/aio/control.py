"""The control of workers, for asyncio."""

from __future__ import annotations

from kvstore.aio.twins import Twin, awaited
from kvstore.client import control


class Control(Twin[control.Control]):
    """As ``kvstore.client.control.Control``. Made by ``Store.control``."""

    def workers(self) -> list[str]:
        """The addresses of all workers."""
        return self._twin.workers()

    lookup = awaited(control.Control.lookup)
    drain = awaited(control.Control.drain)
    limits = awaited(control.Control.limits)
    set_limits = awaited(control.Control.set_limits)
    health = awaited(control.Control.health)
