"""Pins of a host: records in files, which outlive their process."""

from __future__ import annotations

import pytest

from kvstore.errors import Overloaded, RootMismatch
from kvstore.host.pins import PinnedPrints
from kvstore.meta.pins import PinQuota
from tests.kit.host_parts import SPACE, Parts, address
from tests.kit.stores import SetClock


def test_the_refcount_is_the_number_of_live_records(parts: Parts) -> None:
    clock = SetClock(1000.0)
    pins = parts.pins(clock=clock)
    first = pins.pin("me", [address(1), address(2)], 60, 8, SPACE.digest)
    pins.pin("you", [address(1)], 600, 4, SPACE.digest)
    assert (pins.refcount(address(1)), pins.refcount(address(2)), pins.refcount(address(3))) == (2, 1, 0)
    assert [pin.id for pin in pins.list("me")] == [first.id] and len(pins.list()) == 2
    assert pins.unpin("me", first.id) and not pins.unpin("me", first.id)
    assert pins.refcount(address(1)) == 1
    clock.wall_s += 700
    assert pins.list() == () and pins.refcount(address(1)) == 0


def test_evictions_read_new_records_and_remove_ended_ones(parts: Parts) -> None:
    clock = SetClock(1000.0)
    pins, prints = parts.pins(clock=clock), PinnedPrints(parts.root, clock)
    assert not len(prints.read())
    pins.pin("me", [address(1)], 60, 4, SPACE.digest)
    pins.pin("me", [address(1), address(2)], 600, 8, SPACE.digest)
    assert len(prints.read()) == 2
    clock.wall_s += 100
    assert len(prints.read()) == 2 and sum(1 for _ in (parts.folder / "pins").glob("*/*")) == 1
    clock.wall_s += 1000
    assert not len(prints.read()) and not list((parts.folder / "pins").glob("*/*"))


def test_a_record_that_cannot_be_read_stops_evictions(parts: Parts) -> None:
    chain, pin = parts.chain(1), parts.pins().pin("me", [address(1)], 600, 4, SPACE.digest)
    (record,) = (parts.folder / "pins").glob("*/*")
    record.write_bytes(b"{")
    with pytest.raises(RootMismatch, match="What it protects is unknown"):
        parts.evict(chain)
    assert len(parts.files(chain)) == len(chain) and pin.id


def test_pins_over_a_quota_are_refused(parts: Parts) -> None:
    pins = parts.pins(PinQuota(per_owner_max=1, pins_max=2))
    pins.pin("me", [address(1)], 60, 4, SPACE.digest)
    with pytest.raises(Overloaded, match="owner 'me' has 1 pins, the limit is 1"):
        pins.pin("me", [address(1)], 60, 4, SPACE.digest)
    pins.pin("you", [address(1)], 60, 4, SPACE.digest)
    with pytest.raises(Overloaded, match="this store has 2 pins, the limit is 2"):
        pins.pin("them", [address(1)], 60, 4, SPACE.digest)
