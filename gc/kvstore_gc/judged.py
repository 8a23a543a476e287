"""What goals say of listed chunks, one by one and without comparing them: expired, pinned, and how they rank.

The one place that survey and plan share, so that what the plan takes is what the survey counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore_gc.goals import Goals
from kvstore_gc.histogram import Tally
from kvstore_gc.listing import Listed, Marks, are_among, id_of, number_of
from kvstore_gc.policy import TIE_BITS, Column, Truths, Uses, expired, ranks

NO_MARKS: Marks = np.zeros(0, np.uint64)

_TIE_MASK = np.uint64((1 << TIE_BITS) - 1)


@dataclass(frozen=True, slots=True)
class Judged:
    """One element of each column for each chunk of a ``Listed``."""

    uses: Uses
    groups: Column
    """Which group of namespaces of the goals."""
    ranks: Column
    expired: Truths
    pinned: Truths
    """Never both: what is pinned has no time to live."""


def judge(chunks: Listed, now_s: int, goals: Goals, pinned: Marks) -> Judged:
    """Judges some chunks. ``pinned`` are marks in order (``marks_of``)."""
    uses = Uses.of(chunks.mtimes_ns, goals.quantum_s)
    is_pinned = are_among(chunks.marks, pinned)
    ties = (chunks.marks & _TIE_MASK).astype(np.int64)
    return Judged(
        uses,
        _groups(chunks.namespaces, goals),
        ranks(uses, ties, now_s, goals.order),
        expired(uses, now_s, goals.quantum_s, goals.ttl_s) & ~is_pinned,
        is_pinned,
    )


def tally_of(which: Truths, chunks: Listed) -> Tally:
    """Of those chunks."""
    return Tally(int(which.sum()), int(chunks.sizes_bytes[which].sum()))


def _groups(namespaces: Marks, goals: Goals) -> Column:
    known = np.array(sorted(number_of(one) for one in goals.groups), np.uint64)
    if not len(known):
        return np.zeros(len(namespaces), np.int64)
    groups = np.array([goals.groups[id_of(number)] for number in known.tolist()], np.int64)
    at = np.minimum(np.searchsorted(known, namespaces), len(known) - 1)
    return np.where(known[at] == namespaces, groups[at], 0)
