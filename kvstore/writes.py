"""When a put is acknowledged, and what it leaves where: the choice a writer has on a node with memory."""

from __future__ import annotations

import enum

from kvstore.errors import InvalidRequest

RUNS_MAX = 2
"""Runs of one put that are on their way to the root at once. Whoever gives memory to a put's runs gives it to one more,
which arrives meanwhile."""


class WriteMode(enum.Enum):
    """See kvstore/memory/MEMORY.md, "Writing"."""

    THROUGH = "through"
    """Acknowledged when the root has it; memory keeps a copy."""
    BEHIND = "behind"
    """Acknowledged when the node has the bytes, and written to the root soon; lost where it is killed before."""
    AROUND = "around"
    """Acknowledged when the root has it; memory gets it when it is read."""

    @classmethod
    def of(cls, value: WriteMode | str) -> WriteMode:
        """The mode with this name. Raises InvalidRequest."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(mode.value for mode in cls)
            raise InvalidRequest(f"write={value!r}: expected one of {names}") from None
