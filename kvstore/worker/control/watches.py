"""Watches of tickets: a limit on their number, and the times at which each reports a change.

Separate from the service, which authorises a watch and encodes it: a watch does nothing, but keeps a call's thread for
as long as its ticket runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.tickets import Ticket
from kvstore.wire.statuses import Busy, Draining
from kvstore.worker.control.book import Book

SHARE = 1 / 2
"""Share of the calls at once that may be watches: other calls must be served too."""
LOOK_S = 1.0
"""Interval at which a watch looks whether the worker drains."""
CHANGES_S = 0.1
"""Minimum time between two reported changes."""


class Watches:
    """The watches of one worker. Thread-safe."""

    def __init__(self, book: Book, calls_max: Callable[[], int], is_draining: Callable[[], bool]) -> None:
        self._book = book
        self._calls_max = calls_max
        self._is_draining = is_draining
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of watches."""
        return self._count

    def follow(self, ticket: Ticket | None) -> Iterator[Ticket]:
        """Yields a ticket now, after each change, and at its end; ends early if it is forgotten.

        Raises Busy if there are too many watches, Draining.
        """
        with self._one():
            while ticket is not None:
                yield ticket
                if ticket.state.ended:
                    return
                seen = ticket
                while ticket is seen:
                    if self._is_draining():
                        raise Draining("the worker is draining, and its tickets end with it")
                    ticket = self._book.wait(seen, LOOK_S)
                # Frequent changes are reported ten times a second; the end always.
                if ticket is not None and not ticket.state.ended:
                    ticket = self._book.wait_ended(ticket, CHANGES_S)

    @contextmanager
    def _one(self) -> Iterator[None]:
        most = max(1, int(self._calls_max() * SHARE))
        with self._lock:
            if self._count >= most:
                raise Busy(f"{most} tickets are watched here at once: back off")
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
