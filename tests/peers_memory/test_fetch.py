"""Reading from peers: the bytes are those asked for, and a bad peer costs a miss and a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest

from kvstore.census.selection import NOTHING, ClearOrder
from kvstore.core import executor
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.metrics import Counters
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session, SessionManager
from kvstore.meta.workers import Digests, WorkerRecord
from kvstore.peers.limits import PeerLimits
from kvstore.peers.reports import encode
from kvstore.peers.selection import PeerSelector
from kvstore.peers.tier import Peers
from kvstore.transport.channel import SPAN_BYTES, Channel, FrameKind, encode_span
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.etcd import Proxy
from tests.kit.patience import NEVER_S, PATIENCE_S, eventually, returns, slowness
from tests.kit.peer_channel import Say, Speaker, chain_of, honest, image_of, room_for, send_file, speaking, start
from tests.kit.peer_reports import KEYS, Held, shard_of, sorted_prints
from tests.kit.transports import send_head

CLOCK = SystemClock()
PATIENT = PeerLimits(answer_s=PATIENCE_S, follow_s=0.02, aside_s_min=0.2, aside_s_max=0.4)
"""For peers that answer, late perhaps."""
LASTING = replace(PATIENT, aside_s_min=NEVER_S, aside_s_max=NEVER_S)
"""Who failed once is left alone for the whole test."""


def hasty(limits: PeerLimits = LASTING) -> PeerLimits:
    """For peers that do not answer: how long each of their silences takes."""
    return replace(limits, answer_s=0.6 * slowness())


class Reader:
    """A node without memory that reads from peers."""

    def __init__(self, limits: PeerLimits) -> None:
        self.store = MemoryStore()
        self.counters = Counters()
        self.presence = SessionManager(MemoryMetadata(self.store), KEYS)
        self.presence.start(PATIENCE_S)
        self.peers = Peers(
            Digests(MemoryMetadata(self.store), KEYS),
            self.presence,
            Held(),
            PeerSelector(limits, CLOCK, Random(1)),
            self.counters,
            CLOCK,
            limits,
        )
        self.peers.start(None)

    def hears(self, address: str, chain: ChunkKeys, indexes: Sequence[int]) -> None:
        """Somebody tells that a peer has these chunks."""
        meta = MemoryMetadata(self.store)
        session = Session.open(meta, KEYS, clock=CLOCK, ids=RandomIds(), ttl_s=300)
        chunks = [chain.addresses[index] for index in indexes]
        digests = {
            shard: encode(sorted_prints([each for each in chunks if shard_of(each) == shard]))
            for shard in set(map(shard_of, chunks))
        }
        Digests(meta, KEYS).publish(session, digests, WorkerRecord(address), 1.0)
        eventually(lambda: address in self.peers._follower.directory.numbers)  # type: ignore[union-attr]

    def get(self, chain: ChunkKeys, indexes: Sequence[int], seconds: float = NEVER_S) -> list[bool]:
        """Fetches, and checks the chunks reported as received."""
        images = room_for(chain, indexes)
        came = returns(lambda: self.peers.fetch(chain, indexes, images, Deadline(CLOCK, seconds)))
        for index, image, is_here in zip(indexes, images, came, strict=True):
            assert not is_here or bytes(image) == image_of(chain, index)
        return came

    def counted(self, name: str) -> int:
        return self.counters.snapshot().get(name, 0)


@contextmanager
def reading(limits: PeerLimits = PATIENT) -> Iterator[Reader]:
    reader = Reader(limits)
    try:
        yield reader
    finally:
        reader.peers.close(5.0)
        reader.presence.close()


def test_chunks_come_from_a_peers_memory_over_one_connection() -> None:
    """P2: asked for from its memory alone, by the digest of the namespace; runs of chunks in one request."""
    chain = chain_of(12)
    with speaking(honest(chain)) as speaker, reading() as reader:
        reader.hears(speaker.address, chain, range(12))
        assert reader.peers.leading(chain, 0) == 12
        assert reader.get(chain, [1, 2, 3, 7, 8]) == [True] * 5
        assert [(each.first, each.chunks_max) for each in speaker.asked] == [(1, 4), (7, 9)]
        for each in speaker.asked:
            assert (each.memory_only, each.namespace, each.hold) == (True, chain.namespace.digest, b"")
            assert len(each.tokens) == 4 * each.chunks_max * chain.namespace.layout.chunk_tokens
        assert speaker.dials == 1
        assert reader.counted("peers_hits") == 5
        assert reader.counted("peers_bytes") == sum(map(len, room_for(chain, [1, 2, 3, 7, 8])))


def test_a_peer_that_has_less_than_it_said_costs_a_miss() -> None:
    """R4: and it is not set aside for it."""
    chain = chain_of(6)
    with speaking(honest(chain, {0, 1, 4, 5})) as speaker, reading() as reader:
        reader.hears(speaker.address, chain, range(6))
        assert reader.get(chain, range(6)) == [True, True, False, False, False, False]
        assert reader.get(chain, [0]) == [True]
        assert reader.peers.stats()["peers_aside"] == 0


def test_what_one_lacks_another_gives() -> None:
    chain = chain_of(9)
    with speaking(honest(chain)) as a, speaking(honest(chain)) as b, reading() as reader:
        reader.hears(a.address, chain, range(4))
        reader.hears(b.address, chain, [4, 5, 7])
        assert reader.peers.leading(chain, 0) == 6
        assert reader.get(chain, range(9)) == [True] * 6 + [False, True, False]


def wrong_index(channel: Channel, number: int, request: pb.GetRequest) -> None:
    start(channel, number, request.chunks_max)
    send_file(channel, number, request.first + 1, image_of(chain_of(3), request.first + 1))


def too_long(channel: Channel, number: int, request: pb.GetRequest) -> None:
    start(channel, number, request.chunks_max)
    send_file(channel, number, request.first, image_of(chain_of(3), request.first) + b"x")


def too_short(channel: Channel, number: int, request: pb.GetRequest) -> None:
    start(channel, number, request.chunks_max)
    send_file(channel, number, request.first, image_of(chain_of(3), request.first)[:-1])


def breaks_off(channel: Channel, number: int, request: pb.GetRequest) -> None:
    start(channel, number, request.chunks_max)
    image = image_of(chain_of(3), request.first)
    send_head(channel, FrameKind.IMAGES, number, SPAN_BYTES + len(image))
    channel.send_bytes([memoryview(encode_span(request.first, 1)), memoryview(image[:5000])])
    channel.close()


def other_frame(channel: Channel, number: int, _: pb.GetRequest) -> None:
    channel.send(FrameKind.STORED, number, [b""])


def garbage(channel: Channel, _: int, __: pb.GetRequest) -> None:
    channel.send_bytes([memoryview(b"HTTP/1.1 400 Bad Request\r\n\r\n")])


def endless_start(channel: Channel, number: int, _: pb.GetRequest) -> None:
    send_head(channel, FrameKind.SLOTS, number, 64 << 10)
    channel.send_bytes([memoryview(bytes(10))])
    channel.close()


def test_a_lying_peer_is_a_miss_and_is_left_alone() -> None:
    """No missing image is reported as received, and look-ups skip that peer for a while."""
    for say in (wrong_index, too_long, too_short, breaks_off, other_frame, garbage, endless_start):
        chain = chain_of(3)
        with speaking(say) as speaker, reading(LASTING) as reader:
            reader.hears(speaker.address, chain, range(3))
            assert reader.get(chain, range(3)) == [False] * 3
            assert reader.peers.leading(chain, 0) == 0
            assert reader.get(chain, range(3)) == [False] * 3
            assert len(speaker.asked) == 1
            assert reader.counted("peers_failed") == 1


def test_a_peer_whose_chunks_prove_wrong_is_left_alone() -> None:
    """I1: the caller verifies, and reports the peer."""
    chain = chain_of(4)
    with speaking(honest(chain)) as speaker, reading() as reader:
        reader.hears(speaker.address, chain, range(4))
        assert reader.get(chain, [2, 3]) == [True, True]
        reader.peers.damaged(chain, 3)
        assert reader.peers.leading(chain, 0) == 0
        reader.peers.damaged(chain_of(1, seed=9), 0)  # of which nobody knows anything
        eventually(lambda: reader.peers.leading(chain, 0) == 4)


def silent(speaker: list[Speaker]) -> Say:
    def say(channel: Channel, number: int, request: pb.GetRequest) -> None:
        start(channel, number, request.chunks_max)
        send_file(channel, number, request.first, image_of(chain_of(3), request.first))
        speaker[0].ended.wait(NEVER_S)

    return say


def test_a_peer_that_falls_silent_costs_one_bounded_wait() -> None:
    """After SIGSTOP, for one. Those who waited for their turn do not wait again."""
    chain = chain_of(3)
    box: list[Speaker] = []
    with speaking(silent(box)) as speaker, reading(replace(hasty(), links_max=1)) as reader:
        box.append(speaker)
        reader.hears(speaker.address, chain, range(3))
        found: list[list[bool]] = []
        waits = [threading.Thread(target=lambda: found.append(reader.get(chain, range(3)))) for _ in range(4)]
        for each in waits:
            each.start()
        for each in waits:
            each.join()
        *others, one = sorted(found)
        # A busy machine may not have read the first chunk in time.
        assert others == [[False] * 3] * 3 and one in ([True, False, False], [False] * 3)
        assert reader.peers.leading(chain, 0) == 0
        assert reader.get(chain, range(3)) == [False] * 3
        assert len(speaker.asked) <= 1 and speaker.dials == 1


def test_no_wait_is_longer_than_the_callers() -> None:
    chain = chain_of(3)
    box: list[Speaker] = []
    with speaking(silent(box)) as speaker, reading(replace(PATIENT, answer_s=NEVER_S)) as reader:
        box.append(speaker)
        reader.hears(speaker.address, chain, range(3))
        for seconds in (0.3, 0.0):
            assert not all(reader.get(chain, range(3), seconds=seconds))


def test_a_peer_that_trickles_is_given_up() -> None:
    """A byte now and then keeps the connection moving, but not for ever."""
    chain = chain_of(1)

    def say(channel: Channel, number: int, request: pb.GetRequest) -> None:
        start(channel, number, request.chunks_max)
        send_head(channel, FrameKind.IMAGES, number, SPAN_BYTES + len(image_of(chain, 0)))
        channel.send_bytes([memoryview(encode_span(0, 1))])
        while not speaker.ended.wait(0.05):
            channel.send_bytes([memoryview(b"x")])

    with speaking(say) as speaker, reading(hasty()) as reader:
        reader.hears(speaker.address, chain, [0])
        assert reader.get(chain, [0]) == [False]
        assert reader.peers.leading(chain, 0) == 0


def test_a_dead_peer_is_left_alone_until_it_answers() -> None:
    chain = chain_of(2)
    with speaking(honest(chain)) as speaker, reading() as reader:
        proxy = Proxy(speaker.address)
        reader.hears(proxy.endpoint, chain, range(2))
        assert reader.get(chain, [0]) == [True]
        port = proxy.port
        proxy.close()
        speaker.health.set(False)
        reader.peers._roster.blame(proxy.endpoint, "as a test says")
        time_left = [reader.peers.leading(chain, 0) for _ in range(5)]
        assert time_left == [0] * 5
        again = Proxy(speaker.address, port)
        speaker.health.set(True)
        eventually(lambda: reader.peers.leading(chain, 0) == 2)
        assert reader.get(chain, [0, 1]) == [True, True]
        again.close()


def test_closing_cuts_what_is_in_progress() -> None:
    chain = chain_of(3)
    box: list[Speaker] = []
    with speaking(silent(box)) as speaker, reading(replace(PATIENT, answer_s=NEVER_S)) as reader:
        box.append(speaker)
        reader.hears(speaker.address, chain, range(3))
        found: list[list[bool]] = []
        fetching = threading.Thread(target=lambda: found.append(reader.get(chain, range(3))))
        fetching.start()
        eventually(lambda: len(speaker.asked) == 1)
        reader.peers.close(5.0)
        fetching.join(PATIENCE_S)
        assert found in ([[True, False, False]], [[False, False, False]])
        assert reader.get(chain, range(3)) == [False] * 3


def test_a_cleared_namespace_is_not_read_back_from_peers() -> None:
    chain = chain_of(2)
    with speaking(honest(chain)) as speaker, reading() as reader:
        reader.hears(speaker.address, chain, range(2))
        reader.peers.forbid(ClearOrder(frozenset({chain.namespace.id})))
        assert reader.peers.leading(chain, 0) == 0
        assert reader.get(chain, [0, 1]) == [False, False]
        reader.peers.forbid(NOTHING)
        assert reader.get(chain, [0, 1]) == [True, True]


def test_each_chunk_from_a_slow_peer_shows_that_no_root_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, steps = chain_of(6), list[int]()
    with speaking(honest(chain)) as peer, reading() as reader:
        reader.hears(peer.address, chain, range(6))
        monkeypatch.setattr(executor._local, "tick", lambda: steps.append(1), raising=False)
        came = reader.peers.fetch(chain, range(6), room_for(chain, range(6)), Deadline(CLOCK, NEVER_S))
    assert all(came) and len(steps) >= 8, "each chunk, and before and after the wait for a turn"
