"""Watches of tickets: how many at once, and when each of them tells what has changed.

Apart from the service, which says who may watch and puts it into messages: a watch does nothing, but takes a call's
thread for as long as its ticket goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.tickets import Ticket
from kvstore.wire.statuses import Busy, Draining
from kvstore.worker.control.book import Book

SHARE = 1 / 2
"""Of the calls at once: others are served too, however many watch."""
LOOK_S = 1.0
"""How often one looks whether the worker drains."""
CHANGES_S = 0.1
"""Between two changes that one tells, at least."""


class Watches:
    """Those of one worker. Thread-safe."""

    def __init__(self, book: Book, calls_max: Callable[[], int], is_draining: Callable[[], bool]) -> None:
        self._book = book
        self._calls_max = calls_max
        self._is_draining = is_draining
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count

    def follow(self, ticket: Ticket | None) -> Iterator[Ticket]:
        """One ticket now, whenever it has changed, and as it ended; ends early where it is forgotten.

        Raises Busy where there are too many watches, Draining.
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
                # What changes many times a second is told ten times; what it ends as, always.
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
