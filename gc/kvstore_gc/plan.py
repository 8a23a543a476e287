"""What one sweep of one shard is to take, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvstore.address import Address
from kvstore.format.places import Name
from kvstore.namespace import NamespaceId


class Reason(Enum):
    """Why a chunk is kept or condemned."""

    CAPACITY = "capacity"
    TTL = "ttl"


@dataclass(frozen=True, slots=True)
class Victim:
    """A chunk to be condemned."""

    name: Name
    address: Address
    namespace: NamespaceId
    size_bytes: int
    mtime_ns: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The victims of one shard."""

    shard: int
    victims: tuple[Victim, ...]
    kept: Mapping[Reason, int] = field(default_factory=dict)
