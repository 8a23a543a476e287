"""Holds of engine-hashed blocks: what a look-up found is there until it is released, whatever a sweep takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.address import Chain, block_address
from kvstore.client.cache import Cache
from kvstore.client.local import LocalPort
from kvstore.client.store import Store
from kvstore.errors import HoldBroken
from tests.gc.cluster import SPACE, Cluster, cluster, eventually
from tests.node.stores import TINY
from tests.patience import PATIENCE_S

KEYS = [bytes([number]) * 32 for number in range(4)]
BLOCKS = [bytes([number]) * 5000 for number in range(4)]
AS_CHAIN = Chain(SPACE, np.empty(0, np.uint32), tuple(block_address(SPACE, key) for key in KEYS))


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


def opened(c: Cluster) -> Cache:
    return Store(LocalPort(c.node())).namespace(SPACE.name, TINY)


def test_held_blocks_outlive_a_sweep_and_are_read_while_it_waits(c: Cluster) -> None:
    cache = opened(c)
    assert all(cache.blocks.put(KEYS, BLOCKS))
    hold = cache.blocks.hold(KEYS, ttl=60)
    assert hold.present == [True] * 4
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(AS_CHAIN)))
    sweep.start()
    eventually(lambda: not cache.blocks.match(KEYS))
    buffers = [bytearray(5000) for _ in KEYS]
    assert cache.blocks.get(KEYS, buffers) == [False] * 4, "condemned: a miss for everybody else"
    assert cache.blocks.present(KEYS) == [False] * 4
    assert cache.blocks.hold(KEYS).present == [False] * 4
    sweep.join(0.3)
    assert sweep.is_alive()
    assert hold.get(KEYS, buffers) == [True] * 4
    assert [bytes(buffer) for buffer in buffers] == BLOCKS
    hold.release()
    eventually(lambda: not c.present(AS_CHAIN))
    sweep.join(PATIENCE_S)
    with pytest.raises(HoldBroken):
        hold.get(KEYS, buffers)


def test_a_hold_past_its_time_holds_no_sweep_up(c: Cluster) -> None:
    cache = opened(c)
    cache.blocks.put(KEYS, BLOCKS)
    cache.blocks.hold(KEYS, ttl=0.2)
    report = c.collector().sweep(c.plans(AS_CHAIN))
    assert report.reaped.count == 4
    assert cache.blocks.present(KEYS) == [False] * 4
