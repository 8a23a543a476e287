"""How long a chunk is worth keeping: one number, from nothing but its mtime, where a lower one goes first.

Pure, and apart from plans, because it is the part that a trace replay judges (``python -m benchmarks.policies``).

A chunk's *weighted age* is the time since its last use, halved for every second later quantum in which it was used and
for every ten points of priority above the default, doubled for every ten points below.  So what was used more
outlasts what was used once in proportion to how long things last here at all, be it minutes or weeks.  Its *rank* is
that as a number: the older the lower, then the deeper the lower, then by address, so that a cut-off can be put
anywhere, even where everything was written in one minute.

In a chain with the stamps that nodes write (``kvstore.recency``) a parent is used no earlier, no less often, and has
hints no weaker than its child.  So **a parent ranks above its child**, and expires no earlier: whatever is cut off
below a rank leaves every chunk its ancestors.  Where a file system rounds mtimes that holds between quanta only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
import numpy.typing as npt

from kvstore.hints import DEFAULT, PRIORITY_DEFAULT, PRIORITY_MAX, Hints
from kvstore.recency import DEPTH_MAX, DEPTH_STEP_NS, NS_PER_S, USES_MAX, decode, stamp_ns

Column = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

OCTAVES_PER_USE = 0.5
OCTAVES_PER_PRIORITY = 0.1
"""Priority 100 makes an age count 90 times less, which is nearly last to go; 0 makes it count 11 times more. Twice as
much would all but reserve the room for whoever asks for more, which finds less in all (``benchmarks/policies.py``)."""
AGE_LEAST_S = 30
"""Added to every age: a last use is known to the quantum."""
MTIME_MAX_NS = 1 << 62
"""Times outside of 0 to this, which no clock of ours gives, count as these."""

TIE_BITS = 20
_DEPTH_BITS = 19
_OCTAVE_BITS = 16
_OCTAVES_MOST = 44
"""More than any age in octaves, with the lowest priority, so that ranks are positive."""
_WORTH_SHIFT = _DEPTH_BITS + TIE_BITS
_DEEPEST = (1 << _DEPTH_BITS) - 1
_CODE_MAX = stamp_ns(0, 0, Hints(PRIORITY_MAX, None), USES_MAX) - NS_PER_S
_NEVER_S = 1 << 40
"""The ttl of what has none; longer than any age."""

assert DEPTH_MAX <= _DEEPEST


class Order(Enum):
    """What goes first where room is needed."""

    USES = "uses"
    """The oldest by weighted age."""
    LRU = "lru"
    """The least recently used, however often it was used; hints still count."""


@dataclass(frozen=True, slots=True)
class Uses:
    """What the mtimes of some chunks say: one element of each column for each chunk."""

    last_use_s: Column
    """Start of the quantum of the last use."""
    depth: Column
    uses: Column
    priority: Column
    ttl_s: Column
    """What writers asked for; far longer than any age where they asked for none."""

    @classmethod
    def of(cls, mtimes_ns: Column, quantum_s: int) -> Uses:
        """As ``kvstore.recency.decode``, for many at a time. Whatever is no stamp has the default hints, depth 0."""
        mtimes_ns = np.clip(mtimes_ns, 0, MTIME_MAX_NS)
        starts_s = (mtimes_ns - _CODE_MAX - 1) // NS_PER_S
        below = (starts_s + 1) * NS_PER_S - mtimes_ns + _CODE_MAX
        depth = below // DEPTH_STEP_NS
        codes = below - depth * DEPTH_STEP_NS
        table = _codes()
        is_stamp = (starts_s % quantum_s == 0) & (depth <= DEPTH_MAX) & (table[codes, 3] != 0)
        uses, priority, ttl_s = np.where(is_stamp, table[codes, :3].T, _DEFAULT)
        other_s = mtimes_ns // (NS_PER_S * quantum_s) * quantum_s
        return cls(np.where(is_stamp, starts_s, other_s), np.where(is_stamp, depth, 0), uses, priority, ttl_s)


def expired(uses: Uses, now_s: float, quantum_s: int, most_s: float | None) -> Truths:
    """Which chunks are past their time to live: what their writers asked for, but at most ``most_s``.

    It counts from the last use, which is known to the quantum: from its end, so that nothing goes early.  A ttl below
    one quantum cannot be kept exactly, and is kept from its start.
    """
    ttl_s = uses.ttl_s if most_s is None else np.minimum(uses.ttl_s, most_s)
    gone: Truths = now_s - uses.last_use_s >= ttl_s + np.minimum(ttl_s, quantum_s)
    return gone


def ranks(uses: Uses, ties: Column, now_s: float, order: Order) -> Column:
    """The rank of each chunk: lower goes first. ``ties`` are TIE_BITS of each address.

    A last use in the future (a host whose clock is ahead) counts as now.
    """
    ages_s = np.maximum(int(now_s) - uses.last_use_s, 0) + AGE_LEAST_S
    octaves = np.log2(ages_s) - (uses.priority - PRIORITY_DEFAULT) * OCTAVES_PER_PRIORITY
    if order is Order.USES:
        octaves -= uses.uses * OCTAVES_PER_USE
    worth = ((_OCTAVES_MOST - octaves) * (1 << _OCTAVE_BITS)).astype(np.int64)
    # Beyond the depth that a stamp can tell, parents and children look alike: they go together.
    ties = np.where(uses.depth < DEPTH_MAX, ties, 0)
    found: Column = (worth << _WORTH_SHIFT) | ((_DEEPEST - uses.depth) << TIE_BITS) | ties
    return found


def weighted_age_s(rank: int) -> float:
    """The weighted age that a rank stands for, in seconds: what a person understands."""
    octaves = _OCTAVES_MOST - (rank >> _WORTH_SHIFT) / (1 << _OCTAVE_BITS)
    return max(0.0, math.exp2(octaves) - AGE_LEAST_S)


@cache
def _codes() -> Column:
    """Uses, priority, ttl and whether it is one, for each code that a stamp can carry, from the deepest place down."""
    found = np.zeros((DEPTH_STEP_NS, 4), np.int64)
    for place in range(DEPTH_STEP_NS):
        read = decode(2 * NS_PER_S + _CODE_MAX - DEPTH_STEP_NS - place, 1)
        found[place] = read.uses, read.priority, _NEVER_S if read.ttl_s is None else read.ttl_s, read.depth == 1
    return found


_DEFAULT = np.array([[0], [DEFAULT.priority], [_NEVER_S if DEFAULT.ttl_s is None else DEFAULT.ttl_s]])
