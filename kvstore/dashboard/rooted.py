"""The root as it describes itself: its identity, its room, and the files in its quarantine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.format import places
from kvstore.recency import NS_PER_S
from kvstore.root.identity import RootIdentity, create_or_open
from kvstore.root.interface import Root, Space
from kvstore.sources import RandomIds

QUARANTINE_MAX = 10_000
"""Limit on the files counted."""
DAMAGED_MAX = 200
"""Limit on the files named, the last used ones first."""


@dataclass(frozen=True, slots=True)
class RootSeen:
    """The root at one moment."""

    url: str
    identity: RootIdentity
    space: Space


@dataclass(frozen=True, slots=True)
class SetAside:
    """One file in quarantine. ``session`` put it there; ``last_use_s`` is roughly its mtime."""

    address: str
    session: str
    size_bytes: int
    last_use_s: float


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The files that nodes quarantined as damaged. ``is_whole`` is false if there are more than were counted."""

    count: int
    size_bytes: int
    is_whole: bool
    newest: tuple[SetAside, ...]


class RootSource:
    """Looks at the root. The first look calls ``open_root``, because it may hang."""

    def __init__(self, open_root: Callable[[], Root], learn: Callable[[bytes], object]) -> None:
        self._open_root = open_root
        self._learn = learn
        self._root: Root | None = None
        self._identity: RootIdentity | None = None

    def seen(self) -> RootSeen:
        """Returns identity and room. Raises RootMismatch if it is not a root, and the root's errors."""
        root, identity = self.opened()
        return RootSeen(root.url, identity, root.space())

    def quarantine(self) -> Quarantine:
        """Returns the quarantined files. Raises the root's errors."""
        root, _ = self.opened()
        found: list[SetAside] = []
        count = size_bytes = 0
        for entry in root.list(places.QUARANTINE):
            if entry.stat is None:
                continue
            count += 1
            size_bytes += entry.stat.size_bytes
            address, _, rest = entry.name.partition(".")
            found.append(
                SetAside(address, rest.partition(".")[0], entry.stat.size_bytes, entry.stat.mtime_ns / NS_PER_S)
            )
            if count == QUARANTINE_MAX:
                break
        found.sort(key=lambda each: -each.last_use_s)
        return Quarantine(count, size_bytes, count < QUARANTINE_MAX, tuple(found[:DAMAGED_MAX]))

    def opened(self) -> tuple[Root, RootIdentity]:
        """Returns the root and its identity. Raises as ``seen``."""
        if self._root is None:
            self._root = self._open_root()
        if self._identity is None:
            self._identity = create_or_open(self._root, RandomIds(), create=False)
            self._learn(self._identity.root)
        return self._root, self._identity

    def close(self) -> None:
        """Releases the root. Idempotent."""
        if self._root is not None:
            self._root.close()
