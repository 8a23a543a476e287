"""Renews recency after reads: parents before children, once per quantum, on a thread of its own.

It has its own thread because renewal only advises garbage collection: it must cost a reader nothing, and a root that
hangs must stop nothing else. A renewal costs three system calls: a look, and a touch with a look right before it. If
another node has renewed in this quantum, it costs the first look, and none if this node knows that. The same thread
marks abandoned branches, in the order in which uses and abandoned branches are reported to it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.executor import Decision, Loop
from kvstore.core.metrics import Counters, NodeCount
from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import LEAST, Hints, decode, is_coarse, quantum_of, renewed_ns, superseded_ns
from kvstore.engine.chunk_store import ChunkStore
from kvstore.errors import KVStoreError
from kvstore.format.keyset import KeySet
from kvstore.format.places import Name


@dataclass(frozen=True, slots=True)
class _Renewal:
    namespace: NamespaceId
    packed_addresses: bytes
    """The addresses, one after the other."""
    depths: Sequence[int] | None
    """The index of each block in its prompt, as far as the request says; None for a chain from its first chunk on."""
    hints: Hints
    lacking: frozenset[int]
    start_s: float = 0.0
    """The least time of their stamps, if it is later than the start of the quantum."""

    @property
    def count(self) -> int:
        return len(self.packed_addresses) // ADDRESS_BYTES

    def address(self, index: int) -> Address:
        return Address(self.packed_addresses[index * ADDRESS_BYTES : (index + 1) * ADDRESS_BYTES])


@dataclass(frozen=True, slots=True)
class _Branch:
    """The chunks of an abandoned branch, parents first."""

    namespace: NamespaceId
    addresses: tuple[Address, ...]
    depths: range | None
    """The index of each chunk in its chain; None for blocks, whose stamps have it."""
    left_s: int
    """Start of the quantum in which it was left."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The new stamp of one chunk of a renewal; None if its stamp stays."""

    index: int
    name: Name
    stamp_ns: int | None


class TouchQueue:
    """A bounded queue of used chunks."""

    def __init__(self, chunks: ChunkStore, counters: Counters, queue_max: int) -> None:
        self._chunks = chunks
        self._counters = counters
        self._queue_max = queue_max
        self._changed = threading.Condition()
        self._waiting: deque[_Renewal | _Branch] = deque()
        self._is_busy = False
        self._loop = Loop("kvstore-refresh", self._changed, self._next, drains=True)
        self._enabled = chunks.root.traits.touch
        self._keeps_hints: bool | None = None
        self._loop.start()

    def used(self, wanted: KeySet, hints: Hints = LEAST, lacking: frozenset[int] = frozenset()) -> None:
        """Notes that all of these were read or found. Never blocks.

        A put raises the hints of found chunks to its ``hints``: ``lacking`` are the positions of those whose hints were
        lower.
        """
        if not self._enabled or not len(wanted) or self._loop.closed:
            return
        # Neither tokens nor keys are kept.
        depths = None if wanted.prefix_ordered else wanted.depths()
        renewal = _Renewal(wanted.namespace.id, wanted.packed_addresses, depths, hints, lacking)
        if not self._places(renewal, self._chunks.known.quantum()):
            return
        with self._changed:
            is_full = len(self._waiting) + self._is_busy >= self._queue_max
            if not is_full:
                self._waiting.append(renewal)
                self._changed.notify_all()
        if is_full:
            self._counters.add(NodeCount.REFRESH_DROPPED, len(wanted))

    def superseded(self, wanted: KeySet, first: int, left_s: int) -> None:
        """Notes that the chunks from ``first`` on are unused since the quantum ``left_s``. Never blocks."""
        if not self._enabled or first >= len(wanted) or self._loop.closed:
            return
        depths = range(first, len(wanted)) if wanted.prefix_ordered else None
        branch = _Branch(wanted.namespace.id, tuple(wanted.addresses[first:]), depths, left_s)
        with self._changed:  # not shared with ``used``, whose every call is on the path of a read
            if len(self._waiting) + self._is_busy < self._queue_max:
                self._waiting.append(branch)
                self._changed.notify_all()
                return
        self._counters.add(NodeCount.REFRESH_DROPPED, len(branch.addresses))

    def renew(self, chain: KeySet, hints: Hints, lacking: frozenset[int], start_s: float) -> None:
        """Renews the leading chunks of a chain on the calling lane, before a child of theirs gets a fresh stamp."""
        if self._enabled and len(chain):
            try:
                self._renew(_Renewal(chain.namespace.id, chain.packed_addresses, None, hints, lacking, start_s))
            except KVStoreError:
                self._counters.add(NodeCount.REFRESH_DROPPED)

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_busy)

    def close(self, timeout_s: float = 1.0) -> None:
        """Finishes what is queued, as far as ``timeout_s`` allows."""
        self._loop.close(timeout_s)

    def _next(self) -> Decision:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            return partial(self._serve, self._waiting.popleft())
        self._changed.notify_all()  # for ``drain``
        return None

    def _serve(self, noted: _Renewal | _Branch) -> None:
        try:
            if isinstance(noted, _Branch):
                self._supersede(noted)
            else:
                self._renew(noted)
        except KVStoreError:
            self._counters.add(NodeCount.REFRESH_DROPPED)

    def _supersede(self, branch: _Branch) -> None:
        """Marks a branch from its last chunk on, up to the first chunk with a use apart from the branch.

        The last chunk shows when all of the branch was used last. A chunk with a later use belongs to another chain
        as well, and so do those before it: a parent keeps at least the worth of its child. Each is marked right after
        the look at it, since a renewal in between would be lost until the next one.
        """
        chunks, latest_s, is_last = self._chunks, branch.left_s, True
        for place in reversed(range(len(branch.addresses))):
            name = chunks.name(branch.addresses[place], branch.namespace)
            stat = chunks.root.stat(name)
            if stat is None:
                continue
            was = decode(stat.mtime_ns, chunks.known.quantum_s)
            last_use_s = quantum_of(was.last_use_s, chunks.known.quantum_s)
            if last_use_s > latest_s:
                return
            latest_s, is_last = last_use_s if is_last else latest_s, False
            depth = was.depth if branch.depths is None else branch.depths[place]
            stamp = superseded_ns(stat.mtime_ns, chunks.known.quantum_s, depth)
            if stamp is not None and chunks.root.touch(name, stamp):
                # A use in this same quantum has to look at it again.
                chunks.known.forget(branch.addresses[place])
                self._counters.add(NodeCount.SUPERSEDED)

    def _places(self, renewal: _Renewal, quantum: int) -> list[int]:
        """Returns the positions of the chunks that need a look."""
        places = self._chunks.known.unrenewed(renewal.packed_addresses, quantum)
        if not renewal.lacking or self._keeps_hints is False:
            return places
        return sorted({*places, *(place for place in renewal.lacking if place < renewal.count)})

    def _renew(self, renewal: _Renewal) -> None:
        chunks = self._chunks
        quantum, epoch = chunks.known.quantum(), chunks.known.epoch
        for plan in self._planned(renewal, quantum):
            if plan.stamp_ns is not None:
                if self._is_newer(plan):
                    continue
                if not chunks.root.touch(plan.name, plan.stamp_ns):
                    self._counters.add(NodeCount.REFRESH_DROPPED)
                    if renewal.depths is None:
                        return  # the chunk is gone: stop, as in _look
                    continue
                self._counters.add(NodeCount.REFRESHED)
                if self._keeps_hints is None and plan.index in renewal.lacking:
                    self._keeps_hints = self._is_kept(plan.name, plan.stamp_ns)
            address = renewal.address(plan.index)
            # A file of this name is there. A node that looked into it has remembered whether this node can read it.
            if chunks.known.is_present(address, quantum):
                chunks.known.add(address, quantum, renewed=True, epoch=epoch)

    def _is_newer(self, plan: _Plan) -> bool:
        """True if a put of another process has renewed it since the look: its time must not go back."""
        stat = self._chunks.root.stat(plan.name)
        return stat is not None and plan.stamp_ns is not None and stat.mtime_ns >= plan.stamp_ns

    def _planned(self, renewal: _Renewal, quantum: int) -> list[_Plan]:
        """Returns the stamps, parents first.

        No chunk gets lower hints or fewer uses than the chunk behind it. So the next renewal mends what another host's
        renewal at the same moment took away, or what a put set too low when it repaired a chunk.
        """
        plans: list[_Plan] = []
        quantum_s = self._chunks.known.quantum_s
        least, uses_least, start_s = renewal.hints, 0, max(quantum, renewal.start_s)
        for index, name, mtime_ns in reversed(self._look(renewal, quantum)):
            depth = index
            if renewal.depths is not None:  # its writer knew at least as well as this request
                depth = max(renewal.depths[index], decode(mtime_ns, quantum_s).depth)
            stamp = renewed_ns(mtime_ns, start_s, quantum_s, depth, least, uses_least)
            plans.append(_Plan(index, name, stamp))
            if renewal.depths is None:
                after = decode(mtime_ns if stamp is None else stamp, quantum_s)
                least, uses_least = least.raised_to(after.hints), max(uses_least, after.uses)
        plans.reverse()
        return plans

    def _look(self, renewal: _Renewal, quantum: int) -> list[tuple[int, Name, int]]:
        """Returns position, name and mtime of each chunk that may have to be renewed."""
        looked: list[tuple[int, Name, int]] = []
        for index in self._places(renewal, quantum):
            name = self._chunks.name(renewal.address(index), renewal.namespace)
            stat = self._chunks.root.stat(name)
            if stat is not None:
                looked.append((index, name, stat.mtime_ns))
                continue
            # The chunk is gone. Its children keep their older stamps, because a chunk is never staler than its child.
            self._counters.add(NodeCount.REFRESH_DROPPED)
            if renewal.depths is None:
                break
        return looked

    def _is_kept(self, name: Name, stamp_ns: int) -> bool:
        """True if this root keeps times as exactly as hints need; if not, each put would raise the hints again."""
        stat = self._chunks.root.stat(name)
        return stat is None or not is_coarse(stat.mtime_ns) or is_coarse(stamp_ns)
