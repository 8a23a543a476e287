"""When a put is acknowledged, which tiers keep its chunks, and what a crash may lose."""

from __future__ import annotations

import enum
from typing import Literal, get_args

from kvstore.core.validate import brief, checked_flag
from kvstore.errors import InvalidRequest

RUNS_MAX = 2
"""Limit on the runs of one put that are on their way to the root together."""
RUNS_IN_MEMORY = RUNS_MAX + 1
"""Runs of one put that need memory: the one that arrives, too."""
BOUND_BYTES_MIN = 1 << 20
"""Least bound that a root may be given: less holds nothing, and is a size whose unit was forgotten."""

DurabilityName = Literal["none", "everysec", "fsync"]
WriteModeName = Literal["through", "behind"]


class Durability(enum.Enum):
    """Which acknowledged puts a crash of the host may lose."""

    NONE = "none"
    """Those that the kernel has not written: the last half minute with the defaults of Linux."""
    EVERYSEC = "everysec"
    """Those of the last second or so: one sync a second for all (``engine/writer.py``)."""
    FSYNC = "fsync"
    """None: each chunk is synced before a put returns."""

    @classmethod
    def of(cls, value: Durability | str) -> Durability:
        """The durability with this name. Raises InvalidRequest."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(each.value for each in cls)
            raise InvalidRequest(f"durability={brief(value)}: expected one of {names}") from None


class WriteMode(enum.Enum):
    """See kvstore/tiers/MEMORY.md, "Writing"."""

    THROUGH = "through"
    """Acknowledged when the root has it; memory keeps a copy."""
    BEHIND = "behind"
    """Acknowledged when the node has the bytes, and written to the root soon; lost if the node is killed before."""
    UNCACHED = "through, uncached"
    """Acknowledged when the root has it; memory keeps it once it is read. ``put(..., cache=False)``."""

    @classmethod
    def of(cls, value: WriteMode | str) -> WriteMode:
        """The mode with this name. Raises InvalidRequest."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in WRITE_NAMES:
            return cls(value)
        raise InvalidRequest(f"write={brief(value)}: expected one of {', '.join(WRITE_NAMES)}")

    @classmethod
    def of_put(cls, value: WriteMode | str | None, default: WriteMode | None, *, cache: bool) -> WriteMode | None:
        """The mode of one put, None if the node decides. Raises InvalidRequest."""
        mode = default if value is None else cls.of(value)
        if checked_flag("cache", cache):
            return mode
        if value is not None and mode is cls.BEHIND:
            raise InvalidRequest("cache=False with write='behind': expected write='through', which needs no memory")
        return cls.UNCACHED


WRITE_NAMES: tuple[WriteModeName, ...] = get_args(WriteModeName)
