"""The goals of garbage collection: how long chunks stay, and quotas. Configuration and ranking use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvstore.errors import InvalidRequest
from kvstore.namespace import NamespaceId
from kvstore.recency import QUANTUM_S
from kvstore_gc.policy import Order

QUOTA_SHARE = 0.95
"""A quota that is exceeded is brought down to this share, so that not every put exceeds it again."""
GROUPS_MAX = 256
"""Groups of namespaces with the same quotas."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The room that some namespaces may take together: one namespace, or all those of a tenant."""

    label: str
    """For messages: ``tenant 'acme'``, ``namespace 'llama-3.1-8b'``."""
    namespaces: frozenset[NamespaceId]
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits on age and room. Raises InvalidRequest if they make no sense.

    ``ttl_s`` is the longest that a chunk stays unused, whatever its hints say; None: no limit. If namespaces take more
    than their quota, a cycle brings them down to QUOTA_SHARE of it.
    """

    ttl_s: float | None = None
    quotas: tuple[Quota, ...] = ()
    order: Order = Order.USES
    quantum_s: int = QUANTUM_S
    """The quantum of the nodes (``Limits.quantum_s``)."""
    groups: Mapping[NamespaceId, int] = field(init=False, compare=False, repr=False)
    """The group of each namespace that has a quota, from 1; all other namespaces are group 0."""
    group_quotas: tuple[frozenset[int], ...] = field(init=False, compare=False, repr=False)
    """The quotas that apply to each group, by their place in ``quotas``."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not (self.ttl_s >= 0 and math.isfinite(self.ttl_s)):
            raise InvalidRequest(f"ttl_s={self.ttl_s:g}: expected seconds since the last use, 0 or more")
        for quota in self.quotas:
            if quota.max_bytes < 0:
                raise InvalidRequest(f"{quota.label} has max_bytes={quota.max_bytes}: expected 0 or more")
        if self.quantum_s < 2:
            raise InvalidRequest(f"quantum_s={self.quantum_s}: expected what the nodes have, {QUANTUM_S} by default")
        self._group()

    def _group(self) -> None:
        numbers: dict[frozenset[int], int] = {frozenset(): 0}
        groups: dict[NamespaceId, int] = {}
        for namespace in sorted({one for quota in self.quotas for one in quota.namespaces}):
            over = frozenset(place for place, quota in enumerate(self.quotas) if namespace in quota.namespaces)
            groups[namespace] = numbers.setdefault(over, len(numbers))
        if len(numbers) > GROUPS_MAX:
            raise InvalidRequest(
                f"quotas divide the namespaces into {len(numbers)} groups, over the limit of {GROUPS_MAX}: "
                "set quotas per tenant"
            )
        object.__setattr__(self, "groups", MappingProxyType(groups))
        object.__setattr__(self, "group_quotas", tuple(numbers))
