"""The progress of a long-running operation, and the request to end it. Every layer has such operations.

An operation calls its ``Progress`` about once a second or more often, in the thread that it was called in. It passes on
the exception that this may raise, and leaves things so that the same operation, repeated, does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import KVStoreError


class Cancelled(KVStoreError):
    """This operation was asked to end. Its results so far stay. Never raised to a caller of the store."""


Progress = Callable[[int, int], None]
"""``progress(done, total)``; ``total`` is 0 while it is not known. Raises Cancelled, or Unavailable past a deadline."""


def unwatched(done: int, total: int) -> None:
    """A ``Progress`` for operations without an observer that have a deadline of their own."""
