"""The keys of sweeps: each transaction compares what it relies on, key by key (rules G2, G6, G8, C1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore.core.address import Address
from kvstore.core.clock import SystemClock
from kvstore.meta.keys import Keys, SweepId
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.sweeps import Condemned, Seq
from kvstore_gc.ledger import InFlight, SweepStore
from tests.kit.clusters import site_of
from tests.kit.hooked_meta import ActingMeta

KEYS = Keys(b"r" * 16)


class Two:
    """Two collectors on one store."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.meta = ActingMeta(self.store)
        self.ours, self.theirs = (
            SweepStore(site_of(meta, KEYS.root_id)) for meta in (self.meta, MemoryMetadata(self.store))
        )

    def keys(self) -> dict[int, SweepId]:
        return {part: one.sweep for part, one in self.theirs.in_flight().items()}

    def nonce(self) -> bytes:
        found = self.store.get(KEYS.gc_seq)
        assert found is not None
        return Seq.from_json(found.value).nonce


@pytest.fixture
def two() -> Two:
    return Two()


def record(name: str, *, is_final: bool = False) -> Condemned:
    victim = Address(name.encode().ljust(16, b"v"))
    made = Condemned.of_victims(SweepId(name.encode().ljust(16, b"s")), bytes(16), [victim])
    return replace(made, is_final=is_final)


def unlinked(two: Two, part: int, one: Condemned) -> Callable[[], object]:
    """Another sweep gets the key of a part, in a restored store, where the chain of sweeps does not show it."""

    def put() -> None:
        MemoryMetadata(two.store).delete(KEYS.condemned_in(part))
        MemoryMetadata(two.store).put(KEYS.condemned_in(part), one.to_bytes())

    return put


def test_g2_a_part_that_is_condemned_meanwhile_is_left_to_who_was_faster(two: Two) -> None:
    theirs = record("theirs")
    two.meta.once_before_a_sweep_changes(unlinked(two, 2, theirs))
    ours = record("ours")
    assert [one.part for one in two.ours.condemn({1: ours, 2: record("too late")})] == [1]
    assert two.keys() == {1: ours.sweep, 2: theirs.sweep}


def test_c1_a_link_is_put_behind_the_last_one_or_not_at_all(two: Two) -> None:
    two.theirs.condemn({1: record("first")})
    nonces: list[bytes] = []

    def meanwhile() -> None:
        two.theirs.condemn({2: record("second")})
        nonces.append(two.nonce())

    two.meta.once_before_a_sweep_changes(meanwhile)
    assert [one.part for one in two.ours.condemn({3: record("third")})] == [3]
    found = two.store.get(KEYS.gc_seq)
    assert found is not None and [Seq.from_json(found.value).prev] == nonces


@pytest.mark.parametrize("place", [0, 1, 2])
def test_g6_closing_compares_the_key_of_every_part(two: Two, place: int) -> None:
    sweeps = two.ours.condemn({part: record(f"ours {part}") for part in range(3)})
    other = record("another")
    two.meta.once_before_a_sweep_changes(unlinked(two, place, other))
    two.ours.close(sweeps)
    assert two.keys() == {place: other.sweep}, "what is another sweep by now goes on"


def test_g6_closing_leaves_a_part_that_another_sweep_has_by_now(two: Two) -> None:
    (ended,) = two.ours.condemn({2: record("ours")})
    two.theirs.close([ended])
    theirs = record("theirs")
    two.theirs.condemn({2: theirs})
    two.ours.close([ended])
    assert two.keys() == {2: theirs.sweep}


def test_o1_a_list_is_made_final_once(two: Two) -> None:
    (sweep,) = two.ours.condemn({2: record("ours")})
    first, second = (Condemned(sweep.sweep, each * 16, b"v" * 16, True) for each in (b"1", b"2"))
    assert two.theirs.settle(sweep, first) is not None
    settled = two.ours.settle(sweep, second)
    assert settled is not None and settled.record.plan_checksum == first.plan_checksum, "the list that won"


def test_g8_a_sweep_whose_list_became_final_is_not_abandoned(two: Two) -> None:
    (sweep,) = two.ours.condemn({2: record("ours")})
    two.theirs.settle(sweep, record("ours", is_final=True))
    two.ours.abandon([sweep])
    assert two.keys() == {2: sweep.sweep}
    two.ours.close([sweep])
    assert two.keys() == {}


def test_g2_a_sweep_is_known_by_its_stamp_too(two: Two) -> None:
    """After a restore a key may have been put once more: that is another sweep's grace."""
    (sweep,) = two.ours.condemn({2: record("ours")})
    unlinked(two, 2, sweep.record)()
    two.ours.close([InFlight(2, sweep.stamp, sweep.revision, sweep.record)])
    assert two.keys() == {2: sweep.sweep}
