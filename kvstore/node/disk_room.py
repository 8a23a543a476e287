"""The bytes of a local disk tier, as the file system counts them: a ``Room`` without positions.

Separate from the shelf, whose inventory takes its room here.
"""

from __future__ import annotations

BLOCK_BYTES = 4096
"""The block size, unless the file system reports another."""


class FileRoom:
    """Room for files of at most ``size_bytes`` in all, as a file system counts them. Not thread-safe.

    ``take`` returns the charge of the file as its place, so that nothing needs to remember the charge of each file.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.block_bytes = BLOCK_BYTES

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be taken."""
        return self.size_bytes - self.held_bytes

    def charge(self, size_bytes: int) -> int:
        """Returns what a file of that size takes: whole blocks, and one more for the file system's map of a fragmented
        file, which ``st_blocks`` counts too.
        """
        return (-(-size_bytes // self.block_bytes) + 1) * self.block_bytes

    def take(self, size_bytes: int) -> int | None:
        """Charges a file; None if it would pass the bound."""
        charged = self.charge(size_bytes)
        if charged > self.free_bytes:
            return None
        self.held_bytes += charged
        return charged

    def give(self, offset: int) -> None:
        """Takes back a charge: the file is gone."""
        assert 0 < offset <= self.held_bytes
        self.held_bytes -= offset
