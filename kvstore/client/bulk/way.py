"""The path that chunk bytes take between a client and its workers: apart from the links, because users name it."""

from __future__ import annotations

import enum
import os
from typing import Literal

from kvstore.brief import brief
from kvstore.errors import InvalidRequest

BulkName = Literal["auto", "shared", "tcp", "grpc"]


class Bulk(enum.Enum):
    """The path of chunk bytes."""

    AUTO = "auto"
    """The shortest path that works: shared, else tcp, else grpc."""
    SHARED = "shared"
    TCP = "tcp"
    GRPC = "grpc"

    @classmethod
    def of(cls, value: Bulk | str | None) -> Bulk:
        """The path with this name; None reads KVSTORE_BULK from the environment. Raises InvalidRequest."""
        chosen = os.environ.get("KVSTORE_BULK", cls.AUTO.value) if value is None else value
        try:
            return cls(chosen)
        except ValueError as cause:
            names = ", ".join(way.value for way in cls)
            raise InvalidRequest(f"bulk={brief(chosen)} (or KVSTORE_BULK): expected one of {names}") from cause
