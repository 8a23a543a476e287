"""A whole node that reads from lying peers: misses, and never a wrong byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.open import join
from kvstore.engine.settings import Limits, NodeOptions, TierSettings
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session
from kvstore.meta.workers import Digests, WorkerRecord
from kvstore.peers.reports import encode
from kvstore.peers.tier import Peers, join_peers
from kvstore.root.identity import create_or_open
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.transport.channel import Channel, FrameKind
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.etcd import eventually
from tests.kit.patience import PATIENCE_S
from tests.kit.peer_channel import LAYOUT, Say, chain_of, image_of, send_file, speaking, start
from tests.kit.peer_reports import shard_of, sorted_prints

CLOCK = SystemClock()


class Reader:
    """A member without chunks, and the digests that it is told."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        ids, root = RandomIds(), MemoryRoot(MemoryFiles())
        self.member: ClusterMember = join(
            root,
            create_or_open(root, ids),
            MemoryMetadata(self.store),
            limits=Limits(read_deadline_s=PATIENCE_S),
            clock=CLOCK,
            ids=ids,
            options=NodeOptions(tiers=TierSettings(32 << 20, sync_interval_s=0.05)),
        )
        assert self.member.node.tiers is not None
        peers = join_peers(self.member.node.tiers, Digests(self.member.meta, self.member.keys), self.member.presence)
        self.peers: Peers = peers
        self.peers.start(None)
        self.cache = Store(LocalTransport(self.member)).namespace("m", layout=LAYOUT)

    def hears(self, address: str, chain: ChunkKeys) -> None:
        meta, keys = MemoryMetadata(self.store), self.member.keys
        session = Session.open(meta, keys, clock=CLOCK, ids=RandomIds(), ttl_s=300)
        digests = {
            shard: encode(sorted_prints([each for each in chain.addresses if shard_of(each) == shard]))
            for shard in set(map(shard_of, chain.addresses))
        }
        Digests(meta, keys).publish(session, digests, WorkerRecord(address), 1.0)
        eventually(lambda: self.peers.leading(chain, 0) == len(chain))

    def get(self, chain: ChunkKeys) -> int:
        """Returns the number of leading chunks that a get finds, all of them right."""
        count, kv = self.cache.get(chain.tokens)
        chunks = count // LAYOUT.chunk_tokens
        for index in range(chunks):
            image = image_of(chain, index)
            part = kv[:, :, index * LAYOUT.chunk_tokens : (index + 1) * LAYOUT.chunk_tokens]
            assert np.ascontiguousarray(part).tobytes() == image[len(image) - LAYOUT.chunk_bytes :]
        return chunks

    def counted(self, name: str) -> int:
        return self.member.node.counters.snapshot().get(name, 0)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.peers.close(2.0)
    made.member.close()


def altered(position: int) -> Say:
    """All right, but for one bit of the second chunk."""

    def say(channel: Channel, number: int, request: pb.GetRequest) -> None:
        start(channel, number, request.chunks_max)
        for index in range(request.first, request.chunks_max):
            image = bytearray(image_of(chain_of(3), index))
            image[position] ^= index == 1
            send_file(channel, number, index, bytes(image))
        channel.send(FrameKind.END, number)

    return say


def other_chunk(channel: Channel, number: int, request: pb.GetRequest) -> None:
    """Another prompt's chunk, whole and verified, under the number of the one that was wanted."""
    start(channel, number, request.chunks_max)
    for index in range(request.first, request.chunks_max):
        send_file(channel, number, index, image_of(chain_of(3, seed=5 if index == 1 else 0), index))
    channel.send(FrameKind.END, number)


@pytest.mark.parametrize("say", [altered(0), altered(200), altered(-1), other_chunk], ids=lambda say: say.__qualname__)
def test_a_wrong_image_is_a_miss(reader: Reader, say: Say) -> None:
    """I1: whatever is wrong with it; the liar is left alone, and its chunk is in nobody's memory."""
    chain = chain_of(3)
    with speaking(say) as speaker:
        reader.hears(speaker.address, chain)
        assert reader.get(chain) == 1
        assert reader.counted("peers_damaged") >= 1
        assert reader.peers.leading(chain, 1) == 0
        assert reader.get(chain) == 1
