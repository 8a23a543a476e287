"""The interface through which a node's counts get room while no collector gives any. ``Claims`` implements it.

Separate from the counts, which know nothing of keys and disks. In a cluster nobody implements it.
"""

from __future__ import annotations

from typing import Protocol


class Lending(Protocol):
    """Lends a node room of its bound while it cannot rely on the metadata (rule S8). All raise the root's errors."""

    def is_lost(self) -> bool:
        """True if the metadata are lost: not if they cannot be reached for a moment."""
        ...

    def lend(self, size_bytes: int, more_bytes: int) -> int | None:
        """Lends both, or ``size_bytes`` alone; returns how many more, None if there is no room."""
        ...

    def are_left(self) -> bool:
        """True if somebody borrowed, perhaps another process: no level in the metadata knows of it."""
        ...

    def end(self) -> None:
        """Ends the loans: the metadata can be relied on, and their level is forgotten."""
        ...


class Claiming(Protocol):
    """Gives a node room while no collector does (rule S6)."""

    def begin(self) -> None:
        """Is called before the first put of this node. Raises nothing."""
        ...

    def claim(self, lacking_bytes: int, left_bytes: int) -> int | None:
        """Claims ``lacking_bytes`` for writes that are to begin, and some more; returns how many more.

        None if nothing may be claimed. ``left_bytes`` were claimed before, and may still be written.
        """
        ...

    def borrow(self, lacking_bytes: int, left_bytes: int) -> int | None:
        """The same where the metadata are lost; None as well where they are not, or cannot be reached for a moment."""
        ...

    def has_disk_for(self, size_bytes: int) -> bool:
        """True if the disk has room for a put of that size beside the reserve. Raises the root's errors."""
        ...

    def full(self) -> str:
        """Is called when the disk has no room for a put; returns what makes room. Raises nothing."""
        ...

    def refusal(self) -> str:
        """Returns why nothing more may be written now, and what to do. Raises the root's errors."""
        ...

    def settle(self, left_bytes: int) -> None:
        """Gives back what was claimed and not written; if it is negative, counts what was written beyond."""
        ...
