"""Rules against one race each, at the exact moment: what others do between two calls of a collector or node.

The simulation (tests/sim) meets these races rarely or, if another rule hides the loss, never.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvstore.core.address import Address
from kvstore.core.clock import SystemClock
from kvstore.engine.coordination import ClusterMember
from kvstore.format import places
from kvstore.meta.keys import Keys, SessionId, SweepId
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import SessionRecord
from kvstore.meta.store import Snapshot
from kvstore.meta.sweeps import Condemned
from kvstore.root import fences
from kvstore.root.memory import MemoryFile, MemoryRoot
from kvstore_gc.grace import Announced, Grace
from kvstore_gc.ledger import SweepStore
from tests.kit.clusters import SPACE, TIMINGS, Cluster, looking, prompt, put, site_of
from tests.kit.hooked_meta import ActingMeta

KEYS = Keys(b"r" * 16)
CHUNK = places.chunk(Address(bytes(16)), SPACE.id, 0)


class StaleMeta(ActingMeta):
    """The next read of everything gives ``stale``."""

    stale: Snapshot | None = None

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        if self.stale is not None and prefix.count("/") == 3:
            found, self.stale = self.stale, None
            return found
        return super().list(prefix, timeout_s)


def record(sweep: int) -> Condemned:
    return Condemned.of_victims(SweepId(bytes([sweep]) * 16), bytes(16), [])


def ledger(meta: MemoryMetadata) -> SweepStore:
    return SweepStore(site_of(meta, KEYS.root_id))


@pytest.fixture
def meta() -> StaleMeta:
    return StaleMeta(MemoryStore(SystemClock()))


def sweeps(meta: MemoryMetadata) -> dict[int, int]:
    return {part: one.sweep[0] for part, one in ledger(meta).in_flight().items()}


def test_c3_what_was_read_in_the_lost_timeline_ends_no_grace(meta: StaleMeta) -> None:
    """The one read comes in pages: the first may be older than a restore, and name a sweep that is gone."""
    mine = ledger(meta)
    begun = mine.condemn({0: record(1)})
    grace = Grace(site_of(meta, KEYS.root_id), mine)
    assert grace.look(begun).due == begun and grace.decide(begun)[0] == begun
    meta.stale = meta.list(KEYS.prefix)
    mine.close(begun)
    assert grace.decide(begun)[0] == []


def test_g4_what_was_held_when_the_pins_were_read_is_spared(meta: StaleMeta) -> None:
    """It may have been pinned since, and its hold released: neither of the two reads shows that pin."""
    mine, address = ledger(meta), Address(b"a" * 16)
    begun = mine.condemn({0: record(1)})
    lease, key = meta.grant(60), KEYS.session(SessionId(b"s" * 16))
    meta.put(key, SessionRecord(begun[0].stamp, 1, address).to_json(), lease)
    meta.stale = meta.list(KEYS.prefix)
    meta.put(key, SessionRecord(begun[0].stamp, 2).to_json(), lease)
    ready, _, held = Grace(site_of(meta, KEYS.root_id), mine).decide(begun)
    assert ready == begun and address in held


def test_g4_a_session_that_begins_before_the_sweep_is_waited_for(c: Cluster) -> None:
    """However late: here between the look at the chain and the transaction that condemns."""
    first, chain = c.node(), prompt(1, 4)
    put(first, chain)
    meta = ActingMeta(c.store)
    young: list[ClusterMember] = []

    def meanwhile() -> None:
        young.append(c.node())
        assert looking(young[0], chain).count == 4

    meta.once_before_a_sweep_changes(meanwhile)
    collector = c.collector(meta=meta, timings=replace(TIMINGS, announce_lag_max_s=0.3, grace_max_s=60.0))
    thread = threading.Thread(target=lambda: collector.sweep(c.plans(chain)))
    present = []
    real = collector._grace.revoke

    def revoke(laggards: Sequence[Announced]) -> None:
        if laggards:
            present.append(c.present(chain))
        real(laggards)

    collector._grace.revoke = revoke  # type: ignore[method-assign]
    thread.start()
    thread.join(60)
    assert present and present[0] == 4, "nothing was taken before the young session was waited for"


def test_g5_what_goes_back_replaces_no_newer_one() -> None:
    root = MemoryRoot()
    entry = places.trashed(b"s" * 16, CHUNK, b"q" * 8)
    root.files.write(entry, file(b"older"))
    root.files.write(CHUNK, file(b"newer"))
    assert not fences.restore(root, entry, 0)
    found = root.look(CHUNK, 5)
    assert found is not None and bytes(found.prefix) == b"newer" and root.stat(entry) is None


def file(content: bytes) -> MemoryFile:
    return MemoryFile(content, 0)
