"""Publishing the content of a node's memory to others: when, how often, how much, its end; and digests as bytes."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.meta.memory import MemoryMetadata
from kvstore.peers.limits import PeerLimits
from kvstore.peers.reports import BURST_BYTES_MIN, DIGEST_BYTES_MAX, PRINTS_MAX, decode, encode, spots_of
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule
from tests.kit.peer_reports import KEYS, Cluster, Node, addresses_of, print_of, shard_of


def digest_bytes(node: Node) -> int:
    return node.counted("peers_digest_bytes")


def test_what_one_holds_the_others_know() -> None:
    cluster = Cluster(3)
    a, b, c = cluster.nodes
    chunks = addresses_of(40)
    a.held.add(*chunks)
    cluster.sync()
    assert [node.leading(chunks) for node in (a, b, c)] == [0, 40, 40], "never oneself"
    a.held.drop(chunks[10])
    cluster.sync()
    assert [b.leading(chunks), b.leading(chunks, 11)] == [10, 29]
    assert b.follower.directory.coverage(chunks) == {"10.0.0.0:7070": 10}


def test_only_changed_shards_are_written_at_one_revision() -> None:
    cluster = Cluster(1)
    node = cluster.nodes[0]
    chunks = addresses_of(3)
    node.held.add(*chunks)
    node.publisher.step()
    assert node.counted("peers_digests") == len({shard_of(each) for each in chunks})
    before = cluster.store.list("").revision
    node.held.add(chunks[0])
    node.publisher.step()
    assert cluster.store.list("").revision == before, "a change that changes nothing"
    node.held.drop(chunks[0])
    node.publisher.step()
    assert cluster.store.list("").revision == before + 1
    keys = [each.key for each in cluster.store.list(KEYS.peers).items]
    assert KEYS.peer_digest(node.session.id, shard_of(chunks[0])) not in keys, "an empty shard has no key"


def test_bytes_per_second_are_bounded_and_what_waits_comes_in_turn() -> None:
    limits = PeerLimits(bytes_per_s=1 << 16, sync_interval_s=0.25)
    cluster = Cluster(2, limits)
    a, b = cluster.nodes
    chunks = addresses_of(64_000)  # about 3 bytes each
    a.held.add(*chunks)
    published = [digest_bytes(a)]
    began_s = cluster.clock.monotonic_s()
    while True:
        a.publisher.step()
        published.append(digest_bytes(a))
        passed_s = cluster.clock.monotonic_s() - began_s
        assert published[-1] <= BURST_BYTES_MIN + passed_s * limits.bytes_per_s
        if published[-1] == published[-3 if len(published) > 2 else 0] and passed_s > 1:
            break
        cluster.clock.advance(limits.sync_interval_s)
        assert a.meta.keep_alive(a.session.lease)
        a.session.beat()
    cluster.sync()
    assert b.leading(chunks) == len(chunks)
    assert passed_s > 1.5, "it was more than one burst"


def test_who_loses_its_session_forgets_what_etcd_said() -> None:
    """P1: without etcd the node goes on alone, and reads everything again in its next session."""
    cluster = Cluster(2)
    a, b = cluster.nodes
    chunks = addresses_of(20)
    a.held.add(*chunks)
    cluster.sync()
    b.leave()
    assert b.leading(chunks) == 0
    assert b.follower.step(0.0) is False
    b.join()
    assert b.follower.step(0.0) is True
    assert b.leading(chunks) == 20


def test_a_lost_watch_is_only_a_lag() -> None:
    cluster = Cluster(1)
    a = cluster.nodes[0]
    faulty = FaultyMeta(MemoryMetadata(cluster.store, cluster.clock))
    b = Node("10.0.0.8:1", faulty, cluster.clock)
    chunks = addresses_of(20)
    a.held.add(*chunks[:10])
    cluster.sync()
    b.follower.step(0.0)
    assert b.leading(chunks) == 10
    faulty.cut_watches()
    a.held.add(*chunks[10:])
    cluster.sync()
    b.follower.step(0.0)
    assert b.leading(chunks) == 10, "as good as it was"
    b.follower.step(0.0)
    assert b.leading(chunks) == 20
    assert b.counted("peers_reads_afresh") == 2


def test_while_etcd_does_not_answer_nothing_is_lost() -> None:
    """P1: nothing raises; due writes stay due, and known digests stay known while the session lives."""
    cluster = Cluster(1)
    a = cluster.nodes[0]
    waited: list[float] = []
    faulty = FaultyMeta(MemoryMetadata(cluster.store, cluster.clock), sleep=waited.append)
    b = Node("10.0.0.8:1", faulty, cluster.clock)
    theirs, ours = addresses_of(5, 1), addresses_of(5, 2)
    a.held.add(*theirs)
    cluster.sync()
    b.publisher.step()
    b.follower.step(0.0)
    b.held.add(*ours)
    for fault in (Fault.HANG, Fault.NOT_SENT, Fault.DENIED, Fault.REPLY_LOST):
        faulty.add(Rule(fault))
        b.publisher.step()
        faulty.cut_watches()
        b.follower.step(0.0)
        assert b.follower.step(0.0) is False
        assert b.leading(theirs) == 5
        faulty.heal()
    b.publisher.step()
    assert b.follower.step(0.0) is True
    cluster.sync()
    assert a.leading(ours) == 5
    assert max(waited) <= b.limits.meta_deadline_s


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=200))
def test_prints_come_back(numbers: list[int]) -> None:
    prints = np.array(sorted(numbers), np.uint32)
    assert decode(encode(prints)).tolist() == prints.tolist()


def test_a_digest_is_bounded_and_says_so() -> None:
    """Only a part is published of too many prints, and every value stays under the limit, whatever the prints are."""
    prints = np.sort(np.random.default_rng(1).integers(0, 1 << 32, 3 * PRINTS_MAX, dtype=np.uint32))
    value = encode(prints)
    assert len(value) <= DIGEST_BYTES_MAX
    assert decode(value).tolist() == prints[:PRINTS_MAX].tolist()
    assert struct.unpack_from("<HHII", value)[2:] == (PRINTS_MAX, len(prints))
    random = np.random.default_rng(2).integers(0, 256, 4 * PRINTS_MAX, dtype=np.uint8)
    assert len(zlib.compress(random.tobytes(), 1)) + 12 <= DIGEST_BYTES_MAX, "planes that do not compress"


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(value)


def test_a_lying_digest_is_refused() -> None:
    for value in (
        struct.pack("<HHII", 2, 0, 1, 1) + zlib.compress(bytes(4)),
        struct.pack("<HHII", 1, 0, 0, 0) + zlib.compress(b""),
        struct.pack("<HHII", 1, 0, 2, 2) + zlib.compress(bytes(4)),
        struct.pack("<HHII", 1, 0, 1, 1) + zlib.compress(bytes(1 << 24)),
        struct.pack("<HHII", 1, 0, 2, 2) + zlib.compress(b"\xff" * 8),
        struct.pack("<HHII", 1, 0, PRINTS_MAX + 1, 1) + zlib.compress(bytes(4)),
        bytes(DIGEST_BYTES_MAX + 1),
    ):
        with pytest.raises(InvalidRequest):
            decode(value)


def test_spots_are_shard_and_print() -> None:
    addresses = addresses_of(100)
    assert spots_of(addresses).tolist() == [shard_of(each) << 32 | print_of(each) for each in addresses]
