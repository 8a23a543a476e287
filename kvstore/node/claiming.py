"""The interface through which a node's counts get room while no collector gives any. ``Claims`` implements it.

Separate from the counts, which know nothing of keys and disks. In a cluster nobody implements it.
"""

from __future__ import annotations

from typing import Protocol


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
