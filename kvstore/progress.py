"""How a long act says how far it is, and hears that it is to end; apart, because every layer has some of these.

Whoever does the act calls its ``Progress`` about once a second or more often, in the thread that it was called in, and
lets pass what that raises, having left things so that the same act again does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import KVStoreError


class Cancelled(KVStoreError):
    """Somebody asked for this act to end. What was done until then stays done. Never leaves whoever runs the act."""


Progress = Callable[[int, int], None]
"""``progress(done, total)``; ``total`` is 0 while it is not known. Raises Cancelled, or Unavailable past a deadline."""


def unwatched(done: int, total: int) -> None:
    """For acts that nobody watches, and that have a deadline of their own."""
