"""Locks that are taken against their order fail the test (tests/kit/locking.py)."""

from __future__ import annotations

import threading

import pytest

from kvstore.core.metrics import ClientCount, Counts
from tests.kit.locking import Order, OrderedLock, Site, site_of

A, B, C = (Site(f"kvstore.engine.{name}:1", 5) for name in "abc")
LOWER = Site("kvstore.root.object_store:1", 7)


def test_lock_order_follows_import_layers() -> None:
    modules = ("kvstore_gc.cycle", "kvstore.cli.app", "kvstore.engine.engine", "kvstore.root.open", "kvstore.errors")
    layers = [site.layer for module in modules if (site := site_of(module, 1))]
    assert len(layers) == len(modules) and layers == sorted(set(layers))
    assert site_of("threading", 1) is None


@pytest.mark.parametrize("pairs", [[(A, A)], [(A, B), (B, A)], [(A, B), (B, C), (C, A)]])
def test_cycle_within_a_layer_is_a_violation(pairs: list[tuple[Site, Site]]) -> None:
    order = Order()
    broken = [order.check(outer, inner) for outer, inner in pairs * 2]
    assert [bool(each) for each in broken] == [pair == pairs[-1] for pair in pairs] * 2


def test_locks_of_kvstore_are_checked_and_others_are_not() -> None:
    assert isinstance(Counts(ClientCount)._lock, OrderedLock)
    assert not isinstance(threading.Lock(), OrderedLock)
