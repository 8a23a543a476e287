"""The process that made an object. A forked child has a copy without threads; locks held at the fork stay locked."""

from __future__ import annotations

import os

from kvstore.errors import InvalidRequest


class Owner:
    """Knows the owning process. Ask it before any lock: a lock held at the fork is never released in the child."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the object."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raises InvalidRequest in a forked child."""
        if not self.is_here:
            raise InvalidRequest(
                "the store was opened or connected before a fork, and a forked child has none of its "
                "threads: open it in the child, or connect in the child and start the child by spawn"
            )
