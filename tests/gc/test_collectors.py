"""Collectors that share the shards of a root."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import Unavailable
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore_gc.config import Config
from kvstore_gc.membership import TTL_S, Collectors, owner
from kvstore_gc.summary import Summary
from tests.kit.abandoned import in_flight, leave_in_flight
from tests.kit.clusters import prompt, put, site_of
from tests.kit.fake_meta import CountingIds, FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta
from tests.kit.faulty_meta import Rule as MetaRule
from tests.kit.patience import PATIENCE_S
from tests.kit.place import Place


def test_shards_are_shared_and_change_hands_only_where_they_must() -> None:
    ids = [SessionId(bytes([number]) * 16) for number in range(4)]
    before = [owner(shard, ids) for shard in range(1000)]
    after = [owner(shard, ids[:3]) for shard in range(1000)]
    assert all(200 < before.count(one) < 300 for one in ids)
    assert all(new == old for old, new in zip(before, after, strict=True) if old != ids[3])


def test_each_shard_is_one_live_collector_s() -> None:
    clock, ids = FakeClock(), CountingIds()
    store = MemoryStore(clock)
    one, two = (Collectors(site_of(MemoryMetadata(store), clock=clock, ids=ids)) for _ in range(2))
    with pytest.raises(Unavailable, match="joins again"):
        one.shards(16)
    one.beat()
    assert one.shards(16) == list(range(16))
    two.beat()
    shared = one.shards(16) + two.shards(16)
    assert sorted(shared) == list(range(16)) and 0 < len(one.shards(16)) < 16
    two.close()
    assert one.shards(16) == list(range(16))
    clock.advance(TTL_S)
    assert one.me is None
    with pytest.raises(Unavailable):
        one.shards(16)
    one.beat()
    assert one.shards(16) == list(range(16)), "under a new id"


def test_the_smallest_limit_of_the_collectors_holds_for_all_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvstore_gc")
    clock, ids = FakeClock(), CountingIds()
    store = MemoryStore(clock)
    one, two, three = (
        Collectors(site_of(MemoryMetadata(store), clock=clock, ids=ids), max_bytes) for max_bytes in (100, None, 50)
    )
    one.beat()
    two.beat()
    assert (one.smallest_bytes, two.smallest_bytes) == (None, 100)
    three.beat()
    for _ in range(3):
        clock.advance(TTL_S / 3)
        for each in (one, two, three):
            each.beat()
    assert (one.smallest_bytes, two.smallest_bytes, three.smallest_bytes) == (50, 50, 100)
    said = [record for record in caplog.records if record.message.startswith(("gc.smaller_limit", "gc.limit"))]
    assert len(said) == 3, "two of it, when one was there, and one and two of three"
    warned = [record.message for record in said if record.levelname == "WARNING"]
    assert len(warned) == 1 and "max_bytes=50:" in warned[0], "two asks for none, so nobody has to be told"
    three.close()
    one.look()
    assert one.smallest_bytes is None


def test_a_collector_whose_put_stayed_unknown_is_listed_once() -> None:
    clock, keys = FakeClock(), Keys(bytes(16))
    meta = FaultyMeta(MemoryMetadata(MemoryStore(clock)))
    meta.add(MetaRule(Fault.REPLY_LOST, ("put",), times=1))
    one = Collectors(site_of(meta, clock=clock))
    with pytest.raises(Unavailable):
        one.beat()
    one.beat()
    assert len(meta.list(keys.collectors).items) == 1


def test_two_collectors_empty_a_root_together(place: Place) -> None:
    node, chains = place.cluster.node(), [prompt(number, 6) for number in range(6)]
    collectors = [place.cycle(Config(ttl_s=60), collectors=place.half(odd)) for odd in (0, 1)]
    for each in collectors:
        each.run()  # one that has just started might adopt all that the other has begun
    for chain in chains:
        put(node, chain)
        place.age(chain)
    summaries: list[Summary] = []
    threads = [threading.Thread(target=lambda c=each: summaries.append(c.run())) for each in collectors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sum(summary.reaped.count for summary in summaries) == 36
    assert all(summary.reaped.count for summary in summaries)
    assert place.cluster.leftovers() == []


def test_g7_one_that_has_just_started_ends_what_a_dead_one_left_in_shards_that_it_has_still(
    place: Place,
) -> None:
    node, first, later = place.cluster.node(), prompt(1, 12), prompt(2, 12)
    put(node, first)
    leave_in_flight(place.cluster, node, first)
    rounds = place.cycle(collectors=place.part(lambda count: range(1)))
    assert rounds.run().reaped.count == 12 and place.cluster.leftovers() == []
    put(node, later)
    leave_in_flight(place.cluster, node, later)
    rounds.run()
    assert in_flight(place.cluster), "it believes that their collector is alive"
    place.cycle().run()
    assert place.cluster.leftovers() == []
