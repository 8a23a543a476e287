"""The rank of a chunk: how long it is worth keeping, as one number from its mtime alone. A lower rank goes first.

Pure, and separate from plans, because a trace replay judges it (``python -m benchmarks policies``).

A chunk's *weighted age* is the time since its last use. It is halved for every second later quantum in which the chunk
was used and for every ten points of priority above the default, and doubled for every ten points below. So a chunk that
was used often outlasts one that was used once by a factor, whether chunks last for minutes here or for weeks. Its
*rank* orders chunks by weighted age (older is lower), then by depth (deeper is lower), then by address, so that a
cut-off can be put anywhere, even if everything was written in one minute.

In a chain with the stamps that nodes write (``kvstore.core.recency``) a parent is used no earlier and no less often
than its
child, and has no weaker hints. So **a parent ranks above its child**, and expires no earlier: a cut below any rank
leaves every chunk its ancestors. On a file system that rounds mtimes this holds between quanta only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import (
    DEFAULT,
    DEPTH_MAX,
    DEPTH_STEP_NS,
    NS_PER_S,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    QUANTUM_S,
    TICK_NS,
    TICK_S,
    TOP_NS,
    USES_MAX,
    Hints,
    decode,
    stamp_ns,
)
from kvstore.errors import InvalidRequest

Column = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]
Times = npt.NDArray[np.float64]

OCTAVES_PER_USE = 0.5
OCTAVES_PER_PRIORITY = 0.1
"""Priority 100 makes an age count 90 times less, so that the chunk goes nearly last; 0 makes it count 11 times more.
With twice as much, high priorities would nearly reserve the room, and fewer reads would hit in all
(``benchmarks/policies.py``)."""
AGE_LEAST_S = 30
"""Added to every age: a last use is known to the quantum."""
MTIME_MAX_NS = 1 << 62
"""Times outside of 0 to this, which no clock of ours gives, count as the nearer end."""

TIE_BITS = 20
_DEPTH_BITS = 19
_OCTAVE_BITS = 16
_OCTAVES_MOST = 56
"""More than any age in octaves with the lowest priority, so that ranks are positive."""
_WORTH_SHIFT = _DEPTH_BITS + TIE_BITS
_DEEPEST = (1 << _DEPTH_BITS) - 1
_CODE_MAX = stamp_ns(0, 0, Hints(PRIORITY_MAX, None), USES_MAX) - TOP_NS
_NEVER_S = 1 << 40
"""Stands for no ttl; longer than any age."""

assert DEPTH_MAX <= _DEEPEST


class EvictionOrder(Enum):
    """The order in which chunks go when room is needed."""

    USES = "uses"
    """The oldest by weighted age."""
    LRU = "lru"
    """The least recently used, however often it was used; hints still count."""


@dataclass(frozen=True, slots=True)
class Uses:
    """The decoded mtimes of some chunks: each column has one element for each chunk."""

    last_use_s: Times | Column
    """Start of the quantum or tick of the last use."""
    depth: Column
    uses: Column
    priority: Column
    ttl_s: Column
    """The time to live that writers asked for; far longer than any age if they asked for none."""

    @classmethod
    def of(cls, mtimes_ns: Column, quantum_s: int) -> Uses:
        """Does what ``kvstore.core.recency.decode`` does, for many at a time. Other times get default hints, depth
        0.
        """
        mtimes_ns = np.clip(mtimes_ns, 0, MTIME_MAX_NS)
        ticks = mtimes_ns // TICK_NS
        below = ticks * TICK_NS + TOP_NS - mtimes_ns + _CODE_MAX
        depth = below // DEPTH_STEP_NS
        codes = below - depth * DEPTH_STEP_NS
        table = _codes()
        is_stamp = (depth >= 0) & (depth <= DEPTH_MAX) & (table[codes, 3] != 0)
        uses, priority, ttl_s = np.where(is_stamp, table[codes, :3].T, _DEFAULT)
        other_s = mtimes_ns // (NS_PER_S * quantum_s) * quantum_s
        last_use_s = np.where(is_stamp, ticks * TICK_S, other_s)
        depth = np.where(is_stamp, depth, 0)
        return cls(last_use_s, depth, uses, priority, ttl_s)


def expired(uses: Uses, now_s: float, quantum_s: int, most_s: float | None) -> Truths:
    """True for each chunk past its time to live, as its writer asked for it, but at most ``most_s``.

    It counts from the last use, which is known to the quantum: from the quantum's end, so that nothing goes early. A
    ttl below one quantum cannot be kept exactly, and counts from the quantum's start.
    """
    ttl_s = uses.ttl_s if most_s is None else np.minimum(uses.ttl_s, most_s)
    gone: Truths = now_s - uses.last_use_s >= ttl_s + np.minimum(ttl_s, quantum_s)
    return gone


def ranks(uses: Uses, ties: Column, now_s: float, order: EvictionOrder) -> Column:
    """The rank of each chunk: lower goes first. ``ties`` are TIE_BITS of each address.

    A last use in the future (a host whose clock is ahead) counts as now.
    """
    ages_s = np.maximum(int(now_s) - uses.last_use_s, 0) + AGE_LEAST_S
    octaves = np.log2(ages_s) - (uses.priority - PRIORITY_DEFAULT) * OCTAVES_PER_PRIORITY
    if order is EvictionOrder.USES:
        octaves -= uses.uses * OCTAVES_PER_USE
    worth = ((_OCTAVES_MOST - octaves) * (1 << _OCTAVE_BITS)).astype(np.int64)
    # Beyond the depth that a stamp can tell, parents and children look alike: they go together.
    ties = np.where(uses.depth < DEPTH_MAX, ties, 0)
    found: Column = (worth << _WORTH_SHIFT) | ((_DEEPEST - uses.depth) << TIE_BITS) | ties
    return found


@cache
def _codes() -> Column:
    """Uses, priority, ttl and validity (0 or 1) of each code in a stamp, from the deepest place down."""
    found = np.zeros((DEPTH_STEP_NS, 4), np.int64)
    for place in range(DEPTH_STEP_NS):
        read = decode(TICK_NS + TOP_NS + _CODE_MAX - DEPTH_STEP_NS - place, 1)
        ttl_s = _NEVER_S if read.ttl_s is None else read.ttl_s
        found[place] = read.uses, read.priority, ttl_s, read.depth == 1
    return found


_DEFAULT = np.array([[0], [DEFAULT.priority], [_NEVER_S if DEFAULT.ttl_s is None else DEFAULT.ttl_s]])


# The goals of garbage collection: how long chunks stay, and quotas. Configuration and ranking use them.


QUOTA_SHARE = 0.95
"""A quota that is exceeded is brought down to this share, so that not every put exceeds it again."""
GROUPS_MAX = 256
"""Groups of namespaces with the same quotas."""


@dataclass(frozen=True, slots=True)
class NamespaceQuota:
    """The room that some namespaces may take together: one namespace, or all those of a tenant."""

    label: str
    """For messages: ``tenant 'acme'``, ``namespace 'llama-3.1-8b'``."""
    namespaces: frozenset[NamespaceId]
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits on age and space. Raises InvalidRequest for invalid limits.

    ``ttl_s`` is the longest that a chunk stays unused, whatever its hints say; None: no limit. If namespaces take more
    than their quota, a cycle brings them down to QUOTA_SHARE of it.
    """

    ttl_s: float | None = None
    quotas: tuple[NamespaceQuota, ...] = ()
    order: EvictionOrder = EvictionOrder.USES
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
