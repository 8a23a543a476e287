"""The limits of a worker and a node, each by itself: how many at once, and until when."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from kvstore.core.clock import RandomIds
from kvstore.core.metrics import Counters
from kvstore.core.namespace import Namespace
from kvstore.engine.chunk_store import PresenceCache
from kvstore.engine.gc_state import ChunkHold, ClusterGcState, Holds
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken, Overloaded
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.keys import Keys
from kvstore.transport.status import Busy, Draining
from kvstore.worker.context import BytesInFlight, ClientHolds, Gate
from tests.kit.fake_meta import FakeClock
from tests.kit.stores import SMALL

CHAIN = ChunkKeys.of(Namespace.of("m", SMALL), np.arange(2 * SMALL.chunk_tokens, dtype=np.uint32))


def test_no_more_calls_at_once_than_allowed() -> None:
    gate = Gate(2)
    with ExitStack() as inside:
        for _ in range(2):
            inside.enter_context(gate.passing(light=False))
        with pytest.raises(Busy), gate.passing(light=False):
            pass
        with gate.passing(light=True):
            assert gate.inside_count == 2
    with gate.passing(light=False):
        pass


def test_a_closed_worker_takes_no_calls() -> None:
    gate = Gate(2)
    gate.close()
    with pytest.raises(Draining), gate.passing(light=False):
        pass


def test_no_more_bytes_in_flight_than_allowed() -> None:
    in_flight = BytesInFlight(100)
    with in_flight.reserved(60):
        with pytest.raises(Busy), in_flight.reserved(41):
            pass
        with in_flight.reserved(40):
            pass
    with in_flight.reserved(1000):
        pass


def client_holds(released: list[ChunkHold], clock: FakeClock, most: int = 2, tokens: int = 1 << 20) -> ClientHolds:
    return ClientHolds(most, tokens, released.append, lambda hold: hold.ends_s > clock.monotonic_s(), clock)


def hold(number: int, ends_s: float) -> ChunkHold:
    return ChunkHold(bytes([number]), CHAIN, 1, ends_s, None)


def test_no_more_holds_than_allowed() -> None:
    released: list[ChunkHold] = []
    clock = FakeClock()
    for holds in (client_holds(released, clock), client_holds(released, clock, 100, 2 * len(CHAIN.tokens))):
        for number in range(2):
            holds.add(hold(number, clock.monotonic_s() + 60))
        with pytest.raises(Overloaded):
            holds.add(hold(3, clock.monotonic_s() + 60))
        assert holds.release(b"\0")
        holds.add(hold(4, clock.monotonic_s() + 60))
    assert [each.id for each in released].count(b"\3") == 2, "what is refused is released"


def test_a_hold_past_its_time_is_not_found() -> None:
    clock = FakeClock()
    holds = client_holds([], clock)
    holds.add(hold(1, clock.monotonic_s() + 60))
    assert holds.find(b"\1").id == b"\1"
    clock.advance(61)
    with pytest.raises(HoldBroken):
        holds.find(b"\1")


def test_a_node_has_no_more_holds_than_allowed() -> None:
    clock, counters, limits = FakeClock(), Counters(), Limits(holds_max=2, hold_max_s=60.0)
    holds = Holds(
        ClusterGcState(Keys(b"r" * 16), 4, PresenceCache(8, 60, clock), counters),
        limits,
        counters,
        clock,
        RandomIds(),
        print,
    )
    first = holds.take(CHAIN)
    holds.take(CHAIN, 30.0)
    with pytest.raises(Overloaded):
        holds.take(CHAIN)
    clock.advance(31)
    holds.take(CHAIN)
    assert len(holds) == 2, "what is past its time makes room"
    with pytest.raises(Overloaded):
        holds.take(CHAIN)
    holds.release(first)
    holds.take(CHAIN)
