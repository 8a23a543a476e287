"""Collectors of one root: one works."""

from __future__ import annotations

import pytest

from kvstore.errors import Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.membership import Collectors
from tests.kit.abandoned import leave_in_flight
from tests.kit.clusters import eventually, prompt, put, site_of
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta
from tests.kit.faulty_meta import Rule as MetaRule
from tests.kit.place import Place


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
