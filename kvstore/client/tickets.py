"""Tickets: prefetches, moves and releases as a caller of ``Cache`` sees them, in process or at a worker."""

from __future__ import annotations

from kvstore.checks import checked_timeout
from kvstore.client.owner import Owner
from kvstore.client.port import PortMove
from kvstore.errors import KVStoreError


class Ticket:
    """A prefetch, move or release in progress. Made by ``Cache``. Thread-safe.

    As a context it is cancelled at the end if it is not done.
    """

    def __init__(self, move: PortMove, chunk_tokens: int) -> None:
        self._owner = Owner()
        self._move = move
        self._chunk_tokens = chunk_tokens

    def __repr__(self) -> str:
        state = ("failed" if self.error else "done") if self.done else "in progress"
        return f"<kvstore.Ticket {state}, {self.tokens} tokens>"

    @property
    def tokens(self) -> int:
        """Leading tokens done so far, a multiple of chunk_tokens.

        At the end it is fewer than are stored only if there was no room, it was cancelled, or ``error`` is set.
        """
        return self._move.chunks * self._chunk_tokens

    @property
    def done(self) -> bool:
        """True once it has ended, successfully or not."""
        return self._move.done

    @property
    def error(self) -> KVStoreError | None:
        """The error that ended it early, such as Unavailable (the root, or out of time); None if nothing failed."""
        return self._move.error

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it is done, at most ``timeout`` seconds; returns ``tokens``. Never raises for what failed.

        Raises InvalidRequest in a forked child, where the end would never be seen.
        """
        self._owner.check()
        return self._move.wait(checked_timeout(timeout)) * self._chunk_tokens

    def cancel(self) -> None:
        """Cancels it; work already done stays. Idempotent, never waits. Does nothing in a forked child."""
        if self._owner.is_here:
            self._move.cancel()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
