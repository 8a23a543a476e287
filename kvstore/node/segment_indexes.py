"""The indexes of a node: which segments a prompt may contain, for each namespace of segments that is in use.

An index learns from the node's own puts and finds. What other nodes put, it learns from listings of the root, which run
on a thread of their own while prompts are searched at any offset (SEGMENTS.md, S10).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.address import Chain
from kvstore.background import Decision, Loop
from kvstore.namespace import Namespace, NamespaceDigest
from kvstore.node.segment_lister import Followed, SegmentLister
from kvstore.root.interface import Root
from kvstore.segments.index import Index, windows

NAMESPACES_MAX = 8
"""Namespaces with an index, of 16 MiB at most; those used last are kept."""
FIRST_S = 2.0
"""The first search of a namespace waits at most so long for the listing of what was stored before."""
IDLE_S = 60.0
"""The root is listed again and again until nobody has searched for this long."""
REST = 4
"""The next round begins no sooner than this multiple of the last one's duration after it: a fifth of one thread."""
STEP_S = 0.5
"""A round gives its thread back after this time, to tell what it found and to see whether the node is closing."""
NEVER_S = float("-inf")


@dataclass(slots=True, eq=False)
class _Indexed:
    """One namespace. The lock of the indexes guards all but what ``followed`` refers to."""

    followed: Followed
    searched_s: float = NEVER_S
    """When it was last searched at any offset."""
    first_ends_s: float = 0.0
    """Until when searches wait for its first listing."""
    is_listed: bool = False


class SegmentIndexes:
    """The indexes of one node. Thread-safe. ``follow_s`` is the shortest time between two rounds of listings."""

    def __init__(self, root: Root, shard_bits: int, seconds: Callable[[], float], follow_s: float) -> None:
        """``seconds`` is a monotonic clock."""
        self._seconds = seconds
        self._follow_s = follow_s
        self._changed = threading.Condition()  # guards the namespaces, and which round is under way
        self._indexed: dict[NamespaceDigest, _Indexed] = {}
        """Those used last come last."""
        self._lister = SegmentLister(root, shard_bits, seconds)
        self._round: list[_Indexed] | None = None
        self._began_s = self._ended_s = NEVER_S
        self._loop = Loop("kvstore-segments", self._changed, self._next)

    def learn(self, chain: Chain) -> None:
        """Notes a segment that is being put. An entry too many, if it is not stored, costs a look-up."""
        size = chain.namespace.layout.chunk_tokens
        if len(chain):
            self.of(chain.namespace).add(windows(chain.tokens[:size], size), np.array([len(chain)], np.uint32))

    def of(self, namespace: Namespace) -> Index:
        """The index of a namespace, as much as it knows."""
        with self._changed:
            return self._of(namespace).followed.index

    def searched(self, namespace: Namespace, wait_s: float) -> Index:
        """The index for a search at any offset. The first searches wait for a listing, ``wait_s`` at most."""
        with self._changed:
            found, now_s = self._of(namespace), self._seconds()
            if found.searched_s == NEVER_S:
                found.first_ends_s = now_s + FIRST_S
            is_asleep = now_s - found.searched_s > IDLE_S / 2
            found.searched_s = now_s
            if is_asleep:
                self._loop.start()  # the first one starts the thread
                self._changed.notify_all()
            if not found.is_listed:
                left_s = min(wait_s, found.first_ends_s - now_s)
                self._changed.wait_for(lambda: found.is_listed or self._loop.closed, max(0.0, left_s))
        return found.followed.index

    def close(self, timeout_s: float) -> None:
        """Ends the thread. Idempotent."""
        self._loop.close(timeout_s)

    def _of(self, namespace: Namespace) -> _Indexed:
        found = self._indexed.pop(namespace.digest, None) or _Indexed(Followed(namespace, Index()))
        self._indexed[namespace.digest] = found
        while len(self._indexed) > NAMESPACES_MAX:
            del self._indexed[next(iter(self._indexed))]
        return found

    def _next(self) -> Decision:
        if self._round is not None:
            return self._step
        now_s = self._seconds()
        followed = [each for each in self._indexed.values() if each.searched_s > NEVER_S]
        if not any(now_s - each.searched_s <= IDLE_S for each in followed):
            return None
        due_s = self._ended_s + REST * (self._ended_s - self._began_s) if self._ended_s > NEVER_S else NEVER_S
        if all(each.is_listed for each in followed):
            due_s = max(due_s, self._began_s + self._follow_s)
        if now_s < due_s:
            return due_s - now_s
        self._round, self._began_s = followed, now_s
        return self._begin

    def _begin(self) -> None:
        self._lister.begin([each.followed for each in self._round or ()])
        self._step()

    def _step(self) -> None:
        if not self._lister.step(self._seconds() + STEP_S):
            return
        with self._changed:
            for each in self._round or ():
                each.is_listed = True
            self._round, self._ended_s = None, self._seconds()
            self._changed.notify_all()
