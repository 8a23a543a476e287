"""The connections of this process: each hears of the others' changes, and none is open while the process forks.

A child that inherits an open connection, and opens one of its own, gets no locks: SQLite believes that the process has
them, as it had before the fork. Closing in the child what the parent opened is no better.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Open(Protocol):
    """A connection with a thread that may open the file."""

    @property
    def path(self) -> str:
        """The name of the file."""
        ...

    @property
    def rests(self) -> bool:
        """True while the file is closed, and stays so until the fork is over."""
        ...

    def rest(self) -> None:
        """Waits until the connection rests."""
        ...

    def close_inherited(self) -> None:
        """In a forked child: closes what it inherited of the parent's lock."""
        ...

    def wake(self, *, changed: bool = False) -> None:
        """Makes its thread, and those that wait for changes, look again."""
        ...


# Plain sets, each used in single steps. A lock that another thread holds at the fork stays locked in the child.
_connections: set[Open] = set()
_forking: set[int] = set()
_inherited: set[str] = set()
_leaked: list[Open] = []
"""The parent's connections that did not rest in time. They are kept, so that nobody closes them here."""


def joined(connection: Open) -> None:
    """Notes a connection before its thread starts."""
    _connections.add(connection)


def left(connection: Open) -> None:
    """Notes that the thread of a connection has ended."""
    _connections.discard(connection)


def changed(path: str) -> None:
    """Wakes all connections to a file that this process has changed."""
    for connection in tuple(_connections):
        if connection.path == path:
            connection.wake(changed=True)


def is_forking() -> bool:
    """True while a connection must rest."""
    return bool(_forking)


def is_inherited(path: str) -> bool:
    """True if the parent of this process had a file open when it forked, so that this one gets no locks there."""
    return path in _inherited


def _before_fork() -> None:
    _forking.add(threading.get_ident())
    for connection in tuple(_connections):
        connection.rest()


def _in_parent() -> None:
    _forking.discard(threading.get_ident())
    for connection in tuple(_connections):
        connection.wake()


def _in_child() -> None:
    _forking.clear()
    for connection in _connections:
        connection.close_inherited()
    restless = [connection for connection in _connections if not connection.rests]
    _inherited.update(connection.path for connection in restless)
    _leaked.extend(restless)
    _connections.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
