"""The peer tier: chunks from the memory of other workers."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock

import grpc

from kvstore.census.selection import NOTHING, ClearOrder
from kvstore.client.failover import Endpoint
from kvstore.client.pool import PLAIN, Credentials, DataConnection
from kvstore.core.address import Address
from kvstore.core.clock import Clock
from kvstore.core.executor import Deadline, moved_on
from kvstore.core.metrics import Counters, NodeCount, TierName
from kvstore.errors import KVStoreError
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.meta.follower import SessionFollower
from kvstore.meta.session import Session, SessionManager
from kvstore.meta.store import KeyValue, Snapshot, Watch
from kvstore.meta.workers import Digests, WorkerRecord
from kvstore.peers.limits import PeerLimits
from kvstore.peers.reports import EMPTY, DigestPublisher, Directory, PeerReports, Source
from kvstore.peers.selection import Peer, PeerSelector
from kvstore.tiers.stack import TierStack
from kvstore.transport.channel import SPAN_BYTES, FrameKind, Mode, decode_slots, decode_span, encode_request
from kvstore.transport.messages import pack_tokens, traced
from kvstore.transport.status import CallFailed, UnknownNamespace
from kvstore.v1 import kvstore_pb2 as pb

# Asks one peer for chunks in its memory: one GET of the bulk protocol, whole images straight into the given memory.
#
# The rim towards the peer: whatever goes wrong here becomes an answer with fewer images.


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The number of leading images that came whole, and, if the peer must be left alone for a while, the reason."""

    count: int
    trouble: str | None = None


def ask(
    endpoint: Endpoint, chain: ChunkKeys, first: int, images: Sequence[memoryview], idle_s: float, most_s: float
) -> PeerAnswer:
    """Fills ``images``, each of the size of its file, with the chunks from index ``first`` on, unverified.

    Returns after ``idle_s`` without a byte, and after ``most_s`` in all.
    """
    count = 0
    try:
        with endpoint.calling(), endpoint.bulk.link(min(idle_s, most_s)) as link:
            if link is None:
                return PeerAnswer(0)  # all its connections are in use, or it was closed
            link.channel.limit(idle_s, most_s)
            for count in _received(link, chain, first, images, most_s):  # noqa: B007  what came before it broke counts
                moved_on()  # a slow peer is not a root that hangs
    except CallFailed as refused:
        error = refused.error
        # No client has opened the namespace there, so the peer has no chunk of it: nothing is wrong with the peer.
        return PeerAnswer(count, None if isinstance(error, UnknownNamespace) else str(error))
    except grpc.RpcError as error:
        return PeerAnswer(count, f"gRPC: {error.code().name}")
    except (KVStoreError, grpc.FutureCancelledError, ValueError) as error:
        return PeerAnswer(count, str(error) or type(error).__name__)  # gRPC raises a ValueError for a closed channel
    return PeerAnswer(count)


def _received(
    link: DataConnection, chain: ChunkKeys, first: int, images: Sequence[memoryview], timeout_s: float
) -> Iterator[int]:
    """Yields after each image how many have come. Raises LinkBroken, LinkLate, CallFailed."""
    stop = first + len(images)
    size = chain.namespace.layout.chunk_tokens
    request = pb.GetRequest(
        namespace=chain.namespace.digest,
        tokens=pack_tokens(chain.tokens[: stop * size]),
        first=first,
        chunks_max=stop,
        memory_only=True,
    )
    channel, number = link.channel, link.next_number()
    channel.send(FrameKind.GET, number, [encode_request(timeout_s, Mode.STREAM, traced(request))])
    left = decode_slots(link.receive(FrameKind.SLOTS)[1]).found - first
    at = 0
    while at < left:
        head = link.receive_head(FrameKind.IMAGES, FrameKind.END)
        if head.kind is FrameKind.END:
            channel.receive(head.length)
            return
        start, count = decode_span(channel.receive(SPAN_BYTES))
        run = images[at : at + count]
        if start != first + at or len(run) != count or head.length != SPAN_BYTES + sum(map(len, run)):
            raise channel.break_off(f"{head.length} bytes of images came: expected those from chunk {first + at} on")
        for image in run:
            channel.receive_into([image])
            at += 1
            yield at


# One fetch: chooses which peer to ask for which run of chunks, and continues after a failure.


class PeerRead:
    """Reads runs of one chain, one after the other, until ``ends``."""

    def __init__(
        self, directory: Directory, roster: PeerSelector, limits: PeerLimits, chain: ChunkKeys, ends: Deadline
    ) -> None:
        self.failures = 0
        """Number of peers that failed."""
        self._directory = directory
        self._roster = roster
        self._limits = limits
        self._chain = chain
        self._ends = ends
        self._tries_left = limits.tries_max
        self._passed: set[str] = set()

    def run(self, first: int, images: Sequence[memoryview]) -> Iterator[tuple[int, str]]:
        """Fills ``images`` with the chunks from index ``first`` on; yields the position and the peer of each."""
        at = 0
        while at < len(images) and self._tries_left and not self._ends.passed:
            start = first + at
            covered = self._directory.coverage(self._chain.addresses[start : first + len(images)])
            peer = self._roster.choose(covered, self._passed)
            if peer is None:
                # No peer has this chunk, or none that answers: behind the chunks that those peers report, others may
                # have more.
                at += max(covered.values(), default=1)
                continue
            wanted = images[at : at + covered[peer.address]]
            answer = self._ask(peer, start, wanted)
            for each in range(at, at + answer.count):
                yield each, peer.address
            at += answer.count
            if answer.count < len(wanted):
                self._passed.add(peer.address)
                self._tries_left -= 1

    def _ask(self, peer: Peer, first: int, images: Sequence[memoryview]) -> PeerAnswer:
        try:
            moved_on()
            if not peer.turn.acquire(timeout=min(self._limits.answer_s, self._ends.left_s())):
                return PeerAnswer(0)  # busy with other fetches of this node
            moved_on()
            try:
                if peer.address in self._roster.aside:
                    return PeerAnswer(0)  # it failed while this one waited
                left_s = self._ends.left_s()
                if not left_s:
                    return PeerAnswer(0)
                idle_s = min(self._limits.answer_s, left_s)
                answer = ask(peer.endpoint, self._chain, first, images, idle_s, left_s)
            finally:
                peer.turn.release()
            if answer.trouble is None:
                self._roster.praise(peer)
            else:
                self.failures += 1
                self._roster.blame(peer.address, answer.trouble)
            return answer
        finally:
            self._roster.leave(peer)


def runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields where each run of consecutive indexes begins and ends in ``indexes``."""
    start = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield start, at
            start = at


# Follows the peers' reports: one watch that feeds the directory.


log = logging.getLogger(__name__)

BATCHES_MAX = 256
"""Batches of news taken in before the directory is built: a flood must not delay it for ever."""
REST = 4
"""Wait this multiple of the last build time before rebuilding: with many peers there is always news."""


class PeerFollower(SessionFollower):
    """``directory`` is always the newest there is. ``own`` is this node's address, whose digests are left out.

    Its thread also calls ``look_after`` of ``roster``.
    """

    def __init__(
        self,
        digests: Digests,
        own: str | None,
        limits: PeerLimits,
        counters: Counters,
        clock: Clock,
        roster: PeerSelector,
    ) -> None:
        super().__init__("peers", digests, limits.follow_s, limits.meta_deadline_s)
        self.directory: Directory = EMPTY
        self._digests = digests
        self._own = own
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._roster = roster
        # Only the thread uses the fields below.
        self._reports = PeerReports(own, limits.prints_max)
        self._show_at_s = 0.0

    def _forget(self) -> None:
        self.directory = EMPTY

    def _read(self, snapshot: Snapshot, before: Session | None) -> None:
        self._reports = PeerReports(self._own, self._limits.prints_max)
        self._hear((each.key, each) for each in snapshot.items)
        self._counters.add(NodeCount.PEERS_READS_AFRESH)

    def _take(self, watch: Watch, wait_s: float) -> None:
        batch = watch.next(min(wait_s, self._rest_s()) if self._reports.is_changed else wait_s)
        for _ in range(BATCHES_MAX):
            if not batch:
                break
            self._hear((event.key, event.kv) for event in batch)
            batch = watch.next(0.0)

    def _hear(self, keys: Iterable[tuple[str, KeyValue | None]]) -> None:
        for key, found in keys:
            news = self._digests.read(key, found)
            if news is not None:
                self._reports.hear(news)

    def _act(self, session: Session) -> None:
        """Replaces the directory as a whole, unless the session has ended."""
        if not self._reports.is_changed or self._rest_s():
            return
        began_s = self._clock.monotonic_s()
        directory = self._reports.directory()
        now_s = self._clock.monotonic_s()
        self._show_at_s = now_s + REST * (now_s - began_s)
        with self._changed:
            if self._session is session:
                self.directory = directory

    def _rest_s(self) -> float:
        return max(0.0, self._show_at_s - self._clock.monotonic_s())

    def _turn(self) -> None:
        is_followed = self.step(self._wait_s)
        self._roster.look_after(self.directory.numbers)
        if not is_followed:
            self._wait(self._session)


# The tier of peers: chunks that other nodes have in memory, by their reports in etcd, read over bulk connections.


GIVEN_MAX = 4096
"""Limit on chunks whose giver is remembered, in case they prove wrong."""


class Peers:
    """A ``kvstore.tiers.stack.Tier``. Knows nothing, and reports nothing, before ``start``. Thread-safe.

    ``source`` is this node's memory.
    """

    name: TierName = "peers"

    def __init__(
        self,
        digests: Digests,
        presence: SessionManager,
        source: Source,
        roster: PeerSelector,
        counters: Counters,
        clock: Clock,
        limits: PeerLimits,
    ) -> None:
        self.limits = limits
        self._digests = digests
        self._presence = presence
        self._source = source
        self._counters = counters
        self._clock = clock
        self._roster = roster
        self._standing = NOTHING
        self._publisher: DigestPublisher | None = None
        self._follower: PeerFollower | None = None
        self._lock = Lock()  # guards who gave which chunk
        self._given: OrderedDict[Address, str] = OrderedDict()

    def start(self, address: str | None) -> None:
        """Starts to follow peers, and announces ``address`` as that of this node's memory; None: it is not served."""
        assert self._follower is None, "peers are started once"
        follower = self._follower = PeerFollower(
            self._digests, address, self.limits, self._counters, self._clock, self._roster
        )
        follower.start()
        self._presence.attach(follower.begin, follower.end)
        if address is not None:
            record = WorkerRecord(address, pid=os.getpid())
            publisher = self._publisher = DigestPublisher(
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

    def leading(self, wanted: KeySet, first: int) -> int:
        """See ``Tier``. Counts peers that answer, as far as is known; never has engine-hashed blocks."""
        if self._follower is None or not wanted.prefix_ordered or self._standing.means(wanted.namespace.digest):
            return 0
        return self._follower.directory.leading(wanted.addresses, first, self._roster.aside)

    def fetch(
        self, wanted: KeySet, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """See ``Tier``. Takes at most ``answer_s`` plus the time for so many bytes at the slowest allowed rate."""
        came = [False] * len(indexes)
        prompt = wanted.as_prompt()
        is_cleared = self._standing.means(wanted.namespace.digest)
        if self._follower is None or not indexes or prompt is None or is_cleared:
            return came
        slowest_s = self.limits.answer_s + sum(map(len, images)) / self.limits.bytes_per_s_min
        ends = Deadline(self._clock, min(slowest_s, deadline.left_s()))
        fetch = PeerRead(self._follower.directory, self._roster, self.limits, prompt, ends)
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

    def damaged(self, wanted: KeySet, index: int) -> None:
        """See ``Tier``. Leaves the peer that gave it alone for a while."""
        with self._lock:
            address = self._given.pop(wanted.addresses[index], None)
        self._counters.add(NodeCount.PEERS_DAMAGED)
        if address is not None:
            self._roster.blame(address, "a chunk from it was not right")

    def forbid(self, standing: ClearOrder) -> None:
        """See ``Tier``. A peer that has not dropped a cleared namespace yet must not give it back."""
        self._standing = standing

    def stats(self) -> dict[str, int | float]:
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
        self._roster.close()

    def _note(self, chunk: Address, peer: str) -> None:
        with self._lock:
            self._given[chunk] = peer
            self._given.move_to_end(chunk)
            if len(self._given) > GIVEN_MAX:
                self._given.popitem(last=False)


# Adds the tier of peers to a worker: over its memory, under its session, between its memory and its disk.


def join_peers(tiers: TierStack, digests: Digests, presence: SessionManager, credentials: Credentials = PLAIN) -> Peers:
    """Adds a tier of peers to the tiers of a node, and returns it.

    Call ``start`` with the address that others reach it at, once it is served, and ``close`` before that ends.
    """
    node, limits = tiers.node, PeerLimits(sync_interval_s=tiers.settings.sync_interval_s)
    selector = PeerSelector(limits, node.clock, Random(), credentials)
    peers = Peers(digests, presence, tiers.memory, selector, node.counters, node.clock, limits)
    tiers.add_peers(peers)
    return peers
