"""The tier of peers: chunks that other nodes have in memory, by their reports in etcd, read over bulk connections."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from kvstore.address import Address, Chain
from kvstore.counts import NodeCount
from kvstore.meta.digests import Digests
from kvstore.meta.presence import Presence
from kvstore.meta.workers import WorkerRecord
from kvstore.namespace import NamespaceDigest
from kvstore.node.counters import Counters, TierName
from kvstore.node.lanes import Deadline
from kvstore.node.wanted import Wanted
from kvstore.peers.clearing import Clearing
from kvstore.peers.directory import Directory
from kvstore.peers.fetching import Fetch, runs
from kvstore.peers.follower import Follower
from kvstore.peers.limits import PeerLimits
from kvstore.peers.publisher import Publisher, Source
from kvstore.peers.roster import Roster
from kvstore.sources import Clock

GIVEN_MAX = 4096
"""Limit on chunks whose giver is remembered, in case they prove wrong."""


class Peers:
    """A ``kvstore.node.tiers.Tier``. Knows nothing, and reports nothing, before ``start``. Thread-safe.

    ``source`` is this node's memory. ``on_cleared`` is called when a namespace was cleared, mostly in a thread of this
    tier's own: drop the namespace from memory and disk. After ``start`` it is called for every namespace that was ever
    cleared: a refilled local disk may have chunks from before.
    """

    name: TierName = "peers"

    def __init__(
        self,
        digests: Digests,
        presence: Presence,
        source: Source,
        roster: Roster,
        counters: Counters,
        clock: Clock,
        limits: PeerLimits,
        on_cleared: Callable[[NamespaceDigest], None],
    ) -> None:
        self.limits = limits
        self._digests = digests
        self._presence = presence
        self._source = source
        self._counters = counters
        self._clock = clock
        self._on_cleared = on_cleared
        self._roster = roster
        self._publisher: Publisher | None = None
        self._follower: Follower | None = None
        self._lock = Lock()  # guards who gave which chunk, and the cleared namespaces
        self._given: OrderedDict[Address, str] = OrderedDict()
        self._cleared: dict[NamespaceDigest, float] = {}
        self._clearing = Clearing(self._hear_cleared)

    def start(self, address: str | None) -> None:
        """Follows others from now on, and tells them where they can read this node's memory; None: nowhere."""
        assert self._follower is None, "peers are started once"
        follower = self._follower = Follower(
            self._digests, address, self.limits, self._counters, self._clock, self._clearing.add, self._turn
        )
        follower.start()
        self._presence.attach(follower.begin, follower.end)
        if address is not None:
            record = WorkerRecord(address, pid=os.getpid())
            publisher = self._publisher = Publisher(
                self._digests,
                self._source,
                record,
                self.limits,
                self._counters,
                self._clock,
                lambda: len(follower.directory.numbers),
            )
            publisher.start()
            self._presence.attach(publisher.begin, publisher.end)

    def leading(self, wanted: Wanted, first: int) -> int:
        """See ``Tier``. Counts peers that answer, as far as is known; never has engine-hashed blocks."""
        if self._follower is None or not isinstance(wanted, Chain) or self._is_cleared(wanted):
            return 0
        return self._follower.directory.leading(wanted.addresses, first, self._roster.aside)

    def holders(self, wanted: Wanted, index: int) -> tuple[str, ...]:
        """See ``Tier``. Returns the addresses of peers, including those that are left alone for a while."""
        if self._follower is None or not isinstance(wanted, Chain) or self._is_cleared(wanted):
            return ()
        return tuple(sorted(self._follower.directory.coverage(wanted.addresses[index : index + 1])))

    def fetch(
        self, wanted: Wanted, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """See ``Tier``. Takes at most ``answer_s`` plus the time for so many bytes at the slowest allowed rate."""
        came = [False] * len(indexes)
        if self._follower is None or not indexes or not isinstance(wanted, Chain) or self._is_cleared(wanted):
            return came
        slowest_s = self.limits.answer_s + sum(map(len, images)) / self.limits.bytes_per_s_min
        ends = Deadline(self._clock, min(slowest_s, deadline.left_s()))
        fetch = Fetch(self._follower.directory, self._roster, self.limits, wanted, ends)
        for start, stop in runs(indexes):
            for at, address in fetch.run(indexes[start], images[start:stop]):
                came[start + at] = True
                self._note(wanted.addresses[indexes[start] + at], address)
        hits = sum(came)
        self._counters.add(NodeCount.PEERS_HITS, hits)
        self._counters.add(NodeCount.PEERS_MISSES, len(came) - hits)
        self._counters.add(
            NodeCount.PEERS_BYTES, sum(len(image) for image, is_here in zip(images, came, strict=True) if is_here)
        )
        self._counters.add(NodeCount.PEERS_FAILED, fetch.failures)
        return came

    def damaged(self, wanted: Wanted, index: int) -> None:
        """See ``Tier``. Leaves the peer that gave it alone for a while."""
        with self._lock:
            address = self._given.pop(wanted.addresses[index], None)
        self._counters.add(NodeCount.PEERS_DAMAGED)
        if address is not None:
            self._roster.blame(address, "a chunk from it was not right")

    def drop_namespace(self, digest: bytes) -> None:
        """See ``Tier``. Does nothing: prints do not name their namespace, so the peers' own digests have to change."""

    def tell_cleared(self, namespace: NamespaceDigest) -> None:
        """Tells all nodes that a namespace was cleared here, and drops the chunks that came from them meanwhile.

        Raises Unavailable if they may not have heard it.
        """
        mark = os.urandom(16)
        if self._follower is not None:
            self._follower.expect_cleared(mark)
        try:
            self._digests.mark_cleared(namespace, mark, self.limits.meta_deadline_s)
        finally:
            self._hear_cleared(namespace)

    def stats(self) -> dict[str, int | float]:
        """See ``Tier``."""
        known = self._follower.directory if self._follower is not None else None
        return {
            "peers_known": len(known.addresses) if known else 0,
            "peers_prints": len(known.entries) if known else 0,
            "peers_aside": len(self._roster.aside),
        }

    def close(self, timeout_s: float) -> None:
        """See ``Tier``. Running fetches end with what they have."""
        if self._publisher is not None:
            self._publisher.close(timeout_s)
        if self._follower is not None:
            self._follower.close(timeout_s)
        self._clearing.close(timeout_s)
        self._roster.close()

    def _hear_cleared(self, namespace: NamespaceDigest) -> None:
        """Stops reads of a namespace, then drops it: a peer that has not heard of the clear must not give it back."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            for old in [each for each, until_s in self._cleared.items() if until_s <= now_s]:
                del self._cleared[old]
            self._cleared[namespace] = now_s + self.limits.cleared_s
        self._on_cleared(namespace)

    def _is_cleared(self, wanted: Wanted) -> bool:
        until_s = self._cleared.get(wanted.namespace.digest)
        return until_s is not None and self._clock.monotonic_s() < until_s

    def _turn(self, directory: Directory) -> None:
        self._roster.look_after(directory.numbers)

    def _note(self, chunk: Address, peer: str) -> None:
        with self._lock:
            self._given[chunk] = peer
            self._given.move_to_end(chunk)
            if len(self._given) > GIVEN_MAX:
                self._given.popitem(last=False)
