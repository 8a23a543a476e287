"""A node, etcd or a collector stands still for longer than anybody waits, and goes on afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.cache import Cache, Pin
from kvstore.errors import Unavailable
from tests.chaos.cast import SHARD_BITS, Cast, Part, cast
from tests.chaos.play import used_bytes
from tests.chaos.prompts import LAYOUT, SPACE, chain_of, kv
from tests.kit.patience import eventually

pytestmark = pytest.mark.slow

TRIES = 10
MANY = 400
"""Prompts in one sweep, so that a collector can be stopped while it takes them."""


@pytest.fixture
def players(tmp_root: Path, tmp_path: Path) -> Iterator[Cast]:
    root = tmp_root / "root"
    kvstore.open(str(root), shard_bits=SHARD_BITS).close()
    with cast(root, tmp_path) as made:
        yield made


def test_a_collector_woken_long_after_it_stopped_in_a_sweep_takes_nothing(players: Cast) -> None:
    """A collector is stopped in the middle of a sweep; another one ends it; everything is put again and pinned."""
    root = players.root
    with kvstore.open(str(root), players.etcd.endpoints) as store:
        cache = store.namespace(SPACE.name, LAYOUT)

        def put_all() -> set[Path]:
            for number in range(MANY):
                assert cache.put(chain_of(number).tokens, kv(number)).tokens_present == len(chain_of(number).tokens)
            return set(root.glob("chunks/*/*"))

        def stopped_in_a_sweep(name: str) -> tuple[Part, set[Path], list[Path]]:
            """Returns a collector that stands still, the chunks before it, and its leftovers."""
            everything = put_all()
            collector = players.collector(name, "--once", "--ttl", "0s")
            # It takes its time to start, and to plan: only what comes then is over too soon for a look now and then.
            eventually(lambda: any(root.glob("plans/*")) or not collector.is_running, "it has a plan")
            while len(list(root.glob("chunks/*/*"))) == len(everything):
                assert collector.is_running
            collector.send(signal.SIGSTOP)
            return collector, everything, list(root.glob("chunks/*/*"))

        first, everything, left = stopped_in_a_sweep("first")
        for number in range(TRIES):
            if left:
                break
            first.end()  # on a busy machine it is done before the signal comes
            first, everything, left = stopped_in_a_sweep(f"first-{number}")
        assert left, "it was stopped too late each time"
        second = players.collector("second", "--once", "--ttl", "0s")
        eventually(lambda: not second.is_running)
        assert second.codes == [0] and not used_bytes(root)
        assert put_all() == everything
        pins = [pinned(cache, number) for number in range(MANY)]
        first.send(signal.SIGCONT)
        eventually(lambda: not first.is_running)
        assert everything == set(root.glob("chunks/*/*"))
        for number, pin in enumerate(pins):
            assert pin.tokens == len(chain_of(number).tokens)
            count, found = cache.get(chain_of(number).tokens)
            assert count == pin.tokens and np.array_equal(found, kv(number))


def pinned(cache: Cache, number: int) -> Pin:
    """Pins a chain, again while etcd takes longer than the deadline of a pin."""
    pins: list[Pin] = []

    def pin() -> bool:
        with suppress(Unavailable):
            pins.append(cache.pin(chain_of(number).tokens, 600.0))
        return bool(pins)

    eventually(pin, "the pin")
    return pins[0]
