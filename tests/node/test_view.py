"""A node's view: it applies one watch in order, and changes what the node remembers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.core.address import Address
from kvstore.core.clock import SystemClock
from kvstore.core.metrics import Counters
from kvstore.engine.chunk_store import PresenceCache
from kvstore.engine.gc_state import ChainBroken, ClusterGcState
from kvstore.errors import Overloaded
from kvstore.format.keyset import BlockKeys, KeySet
from kvstore.meta.keys import Keys, SweepId
from kvstore.meta.session import Session
from kvstore.meta.store import NO_LEASE, Event, KeyValue, Snapshot
from kvstore.meta.sweeps import NO_NONCE, Condemned, Seq
from kvstore.meta.usage import Capacity
from tests.kit.clusters import SPACE

KEYS, QUANTUM = Keys(b"r" * 16), 1_000_020


def address_in(part: int, number: int = 0) -> Address:
    source = random.Random(f"{part} {number}")
    return Address(bytes([part << 6 | source.randrange(64)]) + source.randbytes(15))


def link(revision: int, nonce: int, prev: int) -> Event:
    value = Seq(bytes([nonce]) * 16, bytes([prev]) * 16 if prev else NO_NONCE).to_json()
    return Event(KEYS.gc_seq, KeyValue(KEYS.gc_seq, value, 1, revision, NO_LEASE), revision)


def condemned(revision: int, part: int, victims: Sequence[Address]) -> Event:
    value = Condemned.of_victims(SweepId(b"s" * 16), b"c" * 16, victims).to_bytes()
    key = KEYS.condemned_in(part)
    return Event(key, KeyValue(key, value, revision, revision, NO_LEASE), revision)


def closed(revision: int, part: int) -> Event:
    return Event(KEYS.condemned_in(part), None, revision)


def asked_for(addresses: Sequence[Address]) -> KeySet:
    return BlockKeys(SPACE, [b"key"] * len(addresses), addresses, ())


class Seen:
    """A view that has begun on an empty store, and its memory."""

    def __init__(self) -> None:
        self.known = PresenceCache(1 << 10, 60, SystemClock())
        self.view = ClusterGcState(KEYS, self.known, Counters())
        self.view.begin(Snapshot((), 10), cast(Session, SimpleNamespace(alive=True)))

    def apply(self, events: list[Event]) -> None:
        with self.view.lock:
            self.view.apply(events)

    def remember(self, *addresses: Address) -> None:
        for address in addresses:
            self.known.add(address, QUANTUM, renewed=False, epoch=self.known.epoch)


def test_h1_the_lead_ends_at_the_first_condemned_address() -> None:
    seen, asked = Seen(), [address_in(part, number) for number in range(6) for part in range(4)]
    assert seen.view.leading(asked_for(asked)) == len(asked)
    seen.apply([link(11, 1, 0), condemned(11, 1, [asked[13], asked[21]])])
    assert seen.view.leading(asked_for(asked)) == 13 and seen.view.revision == 11
    seen.apply([link(12, 2, 1), condemned(12, 3, [asked[3]])])
    assert seen.view.leading(asked_for(asked)) == 3
    seen.apply([link(13, 3, 2), closed(13, 3), closed(13, 1)])
    assert seen.view.leading(asked_for(asked)) == len(asked)


def test_h3_a_sweep_that_begins_or_ends_makes_its_chunks_forgotten() -> None:
    seen, victim, other = Seen(), address_in(1, 1), address_in(1, 2)
    seen.remember(victim, other)
    seen.apply([link(11, 1, 0), condemned(11, 1, [victim])])
    assert [seen.known.is_present(each, QUANTUM) for each in (victim, other)] == [False, True]
    seen.remember(victim)
    seen.apply([link(12, 2, 1), closed(12, 1)])
    assert not seen.known.is_present(victim, QUANTUM), "it may have been found while the sweep was about to take it"
    assert seen.known.is_present(other, QUANTUM)


def test_h3_what_was_looked_at_before_a_sweep_is_not_remembered_after_it() -> None:
    seen, address = Seen(), address_in(2)
    epoch = seen.known.epoch
    seen.apply([link(11, 1, 0), condemned(11, 2, [address])])
    seen.known.add(address, QUANTUM, renewed=False, epoch=epoch)
    assert not seen.known.is_present(address, QUANTUM)


def test_c1_what_does_not_continue_the_chain_is_not_applied() -> None:
    for events in (
        [link(11, 2, 1)],
        [condemned(11, 1, [address_in(1)])],
        [Event(KEYS.gc_seq, None, 11)],
        [link(11, 1, 0), Event(KEYS.condemned_in(1), KeyValue(KEYS.condemned_in(1), b"?", 11, 11, NO_LEASE), 11)],
    ):
        seen = Seen()
        with pytest.raises(ChainBroken):
            seen.apply(events)
        assert seen.view.revision == 10


def test_v2_outside_a_session_nothing_is_protected_or_remembered() -> None:
    seen, victim = Seen(), address_in(3)
    seen.apply([link(11, 1, 0), condemned(11, 3, [victim])])
    seen.remember(address_in(1))
    seen.view.end()
    assert not seen.view.protects and not seen.view.condemns(victim) and len(seen.known) == 0


def test_a_full_root_refuses_puts() -> None:
    seen = Seen()
    seen.apply(
        [Event(KEYS.gc_capacity, KeyValue(KEYS.gc_capacity, Capacity(1, is_full=True).to_json(), 11, 11, NO_LEASE), 11)]
    )
    with pytest.raises(Overloaded, match="full"):
        seen.view.check_room()
    seen.apply([Event(KEYS.gc_capacity, None, 12)])
    seen.view.check_room()
