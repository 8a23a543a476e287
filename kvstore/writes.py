"""The write modes: when a put is acknowledged, and which tiers keep its chunks."""

from __future__ import annotations

import enum

from kvstore.errors import InvalidRequest

RUNS_MAX = 2
"""Runs of one put that are on their way to the root at once."""
RUNS_IN_MEMORY = RUNS_MAX + 1
"""Runs of one put that need memory: the one that arrives, too."""


class WriteMode(enum.Enum):
    """See kvstore/memory/MEMORY.md, "Writing"."""

    THROUGH = "through"
    """Acknowledged when the root has it; memory keeps a copy."""
    BEHIND = "behind"
    """Acknowledged when the node has the bytes, and written to the root soon; lost if the node is killed before."""
    AROUND = "around"
    """Acknowledged when the root has it; memory keeps it once it is read."""

    @classmethod
    def of(cls, value: WriteMode | str) -> WriteMode:
        """The mode with this name. Raises InvalidRequest."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(mode.value for mode in cls)
            raise InvalidRequest(f"write={value!r}: expected one of {names}") from None
