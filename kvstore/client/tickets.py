"""Tickets: prefetches, moves and releases as whoever asked for them sees them, whoever does them."""

from __future__ import annotations

from kvstore.client.owner import Owner
from kvstore.client.port import PortMove
from kvstore.errors import InvalidRequest, KVStoreError


class Ticket:
    """A prefetch, move or release that goes on by itself. Made by ``Cache``. Thread-safe.

    As a context it is cancelled at the end, if it is not done then.
    """

    def __init__(self, move: PortMove, chunk_tokens: int) -> None:
        self._owner = Owner()
        self._move = move
        self._chunk_tokens = chunk_tokens

    @property
    def tokens(self) -> int:
        """Leading tokens done so far, a multiple of chunk_tokens. At the end fewer than are stored only where there was
        no room for more, where it was cancelled, or where ``error`` says why.
        """
        return self._move.chunks * self._chunk_tokens

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self._move.done

    @property
    def error(self) -> KVStoreError | None:
        """What ended it early: Unavailable (the root, or not in time), for one; None where nothing failed."""
        return self._move.error

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it is done, at most ``timeout`` seconds; returns ``tokens``. Never raises for what failed.

        Raises InvalidRequest in a forked child, where nobody would tell it of the end.
        """
        self._owner.check()
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise InvalidRequest(f"timeout={timeout!r}: expected 0 or more seconds")
        return self._move.wait(timeout) * self._chunk_tokens

    def cancel(self) -> None:
        """Has it end soon; what is done stays as it is. Idempotent, never waits. Does nothing in a forked child."""
        if self._owner.is_here:
            self._move.cancel()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
