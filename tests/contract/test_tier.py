"""One contract for all tiers between memory and the root (``kvstore.tiers.stack.Tier``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from kvstore.codec.encodings import Encodings
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.metrics import Counters
from kvstore.core.namespace import Namespace
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session, SessionManager
from kvstore.meta.workers import Digests, WorkerRecord
from kvstore.peers.limits import PeerLimits
from kvstore.peers.reports import encode
from kvstore.peers.selection import PeerSelector
from kvstore.peers.tier import Peers
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.stack import Tier
from tests.kit.keyed import TENANT, key_file
from tests.kit.patience import NEVER_S, PATIENCE_S, eventually
from tests.kit.peer_channel import LAYOUT, chain_of, honest, image_of, room_for, speaking
from tests.kit.peer_reports import KEYS, Held, shard_of, sorted_prints

KINDS = ("disk", "encrypted disk", "peers")
CLOCK = SystemClock()
LIMITS = PeerLimits(answer_s=PATIENCE_S, follow_s=0.02, aside_s_min=NEVER_S, aside_s_max=NEVER_S)


class Source:
    """A tier that has chunks 0 to ``count - 1`` of ``chain``, and none of ``other``."""

    def __init__(self, tier: Tier, chain: ChunkKeys, count: int) -> None:
        self.tier, self.chain, self.count = tier, chain, count
        self.other = ChunkKeys.of(Namespace.of("other", LAYOUT, tenant=chain.namespace.tenant), chain.tokens)

    def fetch(self, indexes: Sequence[int], chain: ChunkKeys | None = None, seconds: float = NEVER_S) -> list[bool]:
        """Which chunks came; those that came have the bytes of their images."""
        wanted = chain or self.chain
        images = room_for(wanted, indexes)
        came = self.tier.fetch(wanted, indexes, images, Deadline(CLOCK, seconds))
        for index, image, has_come in zip(indexes, images, came, strict=True):
            assert not has_come or bytes(image) == image_of(wanted, index), "wrong bytes"
        return came


@contextmanager
def source(kind: str, folder: Path, count: int = 6, missing: int = 2) -> Iterator[Source]:
    """A tier of one kind that has the first ``count`` of ``count + missing`` chunks."""
    chain = chain_of(count + missing)
    if kind == "peers":
        with speaking(honest(chain, set(range(count)))) as speaker:
            store, counters = MemoryStore(), Counters()
            presence = SessionManager(MemoryMetadata(store), KEYS)
            presence.start(PATIENCE_S)
            roster = PeerSelector(LIMITS, CLOCK, Random(1))
            digests = Digests(MemoryMetadata(store), KEYS)
            peers = Peers(digests, presence, Held(), roster, counters, CLOCK, LIMITS)
            peers.start(None)
            try:
                _report(store, speaker.address, chain, count)
                eventually(lambda: peers.leading(chain, 0) == count, "the report is received")
                yield Source(peers, chain, count)
            finally:
                peers.close(5.0)
                presence.close()
        return
    counters, ids = Counters(), RandomIds()
    keys = None
    if kind == "encrypted disk":
        keys = key_file(folder / "keys.json", "a", tenant=TENANT)
        chain = ChunkKeys.of(Namespace.of("m", LAYOUT, tenant=TENANT), chain.tokens)
    encodings = Encodings(keys, counters, ids)
    disk = DiskTier(str(folder / "disk"), 64 << 20, counters, CLOCK, ids, encodings=encodings)
    encodings.learn(chain.namespace)
    disk.open()
    disk.refill()
    try:
        eventually(lambda: not disk.stats()["disk_refilling"], "what the disk held is taken in")
        for index in range(count):
            assert disk.add(chain.place(index), memoryview(image_of(chain, index)))
        yield Source(disk, chain, count)
    finally:
        disk.close(5.0)


def _report(store: MemoryStore, address: str, chain: ChunkKeys, count: int) -> None:
    """Has a peer report the leading chunks of a chain."""
    meta = MemoryMetadata(store)
    session = Session.open(meta, KEYS, clock=CLOCK, ids=RandomIds(), ttl_s=300)
    chunks = chain.addresses[:count]
    digests = {
        shard: encode(sorted_prints([each for each in chunks if shard_of(each) == shard]))
        for shard in set(map(shard_of, chunks))
    }
    Digests(meta, KEYS).publish(session, digests, WorkerRecord(address), 1.0)


COUNT = 6


@pytest.fixture(params=KINDS)
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    with source(request.param, tmp_path, COUNT) as made:
        yield made


def test_leading_from_any_index_counts_what_it_has(held: Source) -> None:
    for first in range(COUNT + 1):
        assert held.tier.leading(held.chain, first) == COUNT - first
    assert held.tier.leading(held.other, 0) == 0


@pytest.mark.parametrize("indexes", [[0], [5], [0, 1, 2, 3, 4, 5], [2, 3], [1, 4], [3, 4, 5], [0, 2, 3, 5]], ids=str)
def test_fetch_of_any_indexes_returns_their_images(held: Source, indexes: list[int]) -> None:
    assert held.fetch(indexes) == [True] * len(indexes)


def test_fetch_of_missing_chunks_returns_the_others(held: Source) -> None:
    assert held.fetch([4, 5, 6, 7]) == [True, True, False, False]
    assert held.fetch([6]) == [False]
    assert held.fetch([0, 1], held.other) == [False, False]
    assert held.fetch([]) == []


@pytest.mark.parametrize("indexes", [[0, 1], [2, 3], [1, 4], [3, 4, 5]], ids=str)
@pytest.mark.parametrize("at", [0, -1])
def test_chunk_that_proved_wrong_is_not_offered_again(held: Source, indexes: list[int], at: int) -> None:
    """Wherever the fetch began, and whichever of its chunks it was."""
    assert all(held.fetch(indexes))
    held.tier.damaged(held.chain, indexes[at])
    assert held.tier.leading(held.chain, indexes[at]) == 0
    assert held.fetch([indexes[at]]) == [False]


def test_fetch_past_deadline_raises_nothing(held: Source) -> None:
    held.fetch([0, 1], seconds=0.0)


def test_gauges_begin_with_name_of_tier(held: Source) -> None:
    stats = held.tier.stats()
    assert stats and all(name.startswith(f"{held.tier.name}_") for name in stats)


def test_close_is_idempotent_and_ends_fetches_quietly(held: Source) -> None:
    held.tier.close(5.0)
    held.tier.close(5.0)
    held.fetch([0])
