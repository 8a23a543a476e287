"""A node, etcd or a collector stands still for longer than anybody waits, and goes on afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.cache import Cache, Pin
from kvstore.errors import Unavailable
from kvstore.meta.session import TTL_S
from kvstore_gc.site import Timings
from tests.chaos.cast import FOUND_BROKEN, SHARD_BITS, Cast, Part, cast
from tests.chaos.conftest import is_weak
from tests.chaos.gauge import used_bytes
from tests.chaos.journal import VIOLATION
from tests.chaos.prompts import LAYOUT, SPACE, chain_of, kv
from tests.kit.etcd import frozen
from tests.kit.patience import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

FREEZE_S = 1.5 * TTL_S
TRIES = 10
MANY = 400
"""Prompts in one sweep, so that a collector can be stopped while it takes them."""


@pytest.fixture
def players(tmp_root: Path, tmp_path: Path) -> Iterator[Cast]:
    root = tmp_root / "root"
    kvstore.open(str(root), shard_bits=SHARD_BITS).close()
    with cast([root], tmp_path) as made:
        yield made


def test_a_node_stopped_while_it_holds_delays_collectors_by_no_more_than_its_lease(players: Cast) -> None:
    root = players.roots[0]
    holder = players.part("holder", "tests.chaos.holder", "--prompts", "1")
    eventually(lambda: _said(holder) == ["held"])
    # Round after round: a single one may come within the second in which the chunks count as new.
    players.collector("gc", "--interval", "1s", "--ttl", "0s")
    time.sleep(3.0)
    assert used_bytes(root) > 0 and _said(holder) == ["held"], "a node that lives is waited for"
    assert holder.process is not None
    with frozen(holder.process.pid):
        stopped_s = time.monotonic()
        # Nobody else ends its hold: a collector would wait for a node that is late for far longer than this test.
        assert Timings().announce_lag_max_s > 2 * PATIENCE_S > 4 * TTL_S
        try:
            eventually(lambda: used_bytes(root) == 0, "what nobody holds any more is taken")
        except AssertionError:
            print(players.tail("gc", 50))
            raise
        delay_s = time.monotonic() - stopped_s
    eventually(lambda: len(_said(holder)) == 3)
    print(f"\ncollected {delay_s:.1f} s after the node was stopped; its lease is {TTL_S} s")
    assert _said(holder) == ["held", "broken", "right"]


def test_a_frozen_etcd_stops_collectors_without_harm_and_they_go_on_afterwards(players: Cast) -> None:
    node = players.node("node", 100)
    players.collector("gc", "--interval", "1s", "--ttl", "1s")
    auditor = players.auditor()
    eventually(lambda: players.rounds()["reaped"] > 0 and players.counts()["pins acknowledged"] > 2)
    with frozen(players.etcd.pid):
        eventually(lambda: "gc.round_failed" in players.tail("gc", 10_000), "a round fails")
        before, verified = players.rounds()["rounds"], players.counts()["chunks verified"]
        time.sleep(FREEZE_S)
        assert players.rounds()["rounds"] == before, "nobody knows what may be taken"
    reaped = players.rounds()["reaped"]
    eventually(lambda: players.rounds()["reaped"] > reaped and players.counts()["pin"] > 0)
    eventually(lambda: players.counts()["chunks verified"] > verified)
    for part in (node, auditor):
        part.end()
    assert FOUND_BROKEN not in node.codes + auditor.codes, players.facts(VIOLATION)
    assert players.counts()["sessions_lost"] >= 1, "the node knew that its session was over"


def test_a_collector_stopped_while_it_reaps_takes_nothing_when_it_is_woken_long_after(players: Cast) -> None:
    wake_a_reaper_late(players, weak=False)


@pytest.mark.real_fs
def test_a_collector_woken_late_on_two_mounts(two_mounts: list[Path], tmp_path: Path) -> None:
    roots = [mount / "root" for mount in two_mounts]
    kvstore.open(str(roots[0]), shard_bits=SHARD_BITS).close()
    with cast(roots, tmp_path) as made:
        wake_a_reaper_late(made, weak=is_weak(two_mounts[0]))


def wake_a_reaper_late(players: Cast, *, weak: bool) -> None:
    """A collector is stopped in the middle of a sweep; another one ends it; everything is put again and pinned."""
    root = players.roots[0]
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
        misses = everything - set(root.glob("chunks/*/*"))
        print(f"\nstopped when {len(left)} of {len(everything)} chunks were left; {len(misses)} are missed afterwards")
        assert weak or not misses
        if misses:  # the next round puts them back
            last = players.collector("last", "--once", "--max-bytes", "1GiB")
            eventually(lambda: not last.is_running)
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


def _said(part: Part) -> list[str]:
    return (part.folder / f"{part.name}.{part.starts_count:03}.out").read_text().split()
