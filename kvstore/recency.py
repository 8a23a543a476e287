"""Recency without etcd and without atime: what a chunk's mtime says, and when a reader renews it.

A stamp is the start of the current *quantum* (60 s by default) plus one second, minus one microsecond per chunk of
depth in its chain.  From that follow the three properties that garbage collection relies on:

* Readers renew a chunk at most once per quantum (rate limit, without remembering who did).
* Whoever renews a chunk renews its ancestors first, to the same quantum, so a chunk is never staler than its child.
* Among chunks of one quantum a child is strictly staler than its parent, so that LRU order takes leaves first.

A file system that keeps mtime in whole seconds loses only the third property.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000
DEPTH_STEP_NS = 1_000
DEPTH_MAX = 999_999


def quantum_of(now_s: float, quantum_s: int) -> int:
    """Start of the quantum that ``now_s`` lies in, in whole seconds since the epoch."""
    return int(now_s) // quantum_s * quantum_s


def stamp_ns(quantum_start_s: int, depth: int) -> int:
    """The mtime of a chunk at ``depth`` in its chain (0 is the first), renewed in that quantum; nanoseconds."""
    return (quantum_start_s + 1) * NS_PER_S - min(depth, DEPTH_MAX) * DEPTH_STEP_NS


def is_fresh(mtime_ns: int, quantum_start_s: int) -> bool:
    """Whether a stamp belongs to that quantum, or to a later one (a host whose clock is ahead)."""
    return mtime_ns >= quantum_start_s * NS_PER_S
