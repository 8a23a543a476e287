"""Collectors of one root: one works, and all keep the smallest limit."""

from __future__ import annotations

import pytest

from kvstore.errors import Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.membership import TTL_S, Collectors
from tests.kit.abandoned import leave_in_flight
from tests.kit.clusters import eventually, prompt, put, site_of
from tests.kit.fake_meta import CountingIds, FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta
from tests.kit.faulty_meta import Rule as MetaRule
from tests.kit.place import Place


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
    said = [record for record in caplog.records if record.message.startswith("gc.smaller_limit")]
    assert len(said) == 3, "two of it, when one was there, and one and two of three"
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


def test_of_two_collectors_one_works_and_the_other_takes_over(place: Place) -> None:
    sites = [place.cluster.site() for _ in range(2)]
    collectors = [Collectors(site) for site in sites]
    pressures = [Pressure(site, 1 << 30, mine) for site, mine in zip(sites, collectors, strict=True)]
    cycles = [
        Cycle(site, Config(ttl_s=60), pressure, mine)
        for site, pressure, mine in zip(sites, pressures, collectors, strict=True)
    ]
    node, first, later = place.cluster.node(), prompt(1, 12), prompt(2, 12)
    for pressure in pressures:
        pressure.tick()
    put(node, first)
    place.age(first)
    assert [cycle.run().reaped.count for cycle in reversed(cycles)] == [0, 12]
    assert not cycles[1].is_spent and cycles[1].evict() is None
    put(node, later)
    leave_in_flight(place.cluster, node, later)
    collectors[0].close()

    def takes_over() -> bool:
        pressures[1].tick()
        return cycles[1].is_spent

    eventually(takes_over)
    assert cycles[1].run().sweeps["adopted"] > 0
    assert place.cluster.leftovers() == [] and place.cluster.present(later) == 0
