"""Holds of engine-hashed blocks: a block found by a look-up stays until it is released, whatever a sweep takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import grpc
import numpy as np
import pytest

from kvstore.client.cache import Cache
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.address import block_address
from kvstore.core.executor import Deadline
from kvstore.errors import HoldBroken
from kvstore.format.keyset import BlockKeys, ChunkKeys
from kvstore.root.posix import PosixRoot
from kvstore.transport.messages import pack_keys, sealed
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.server import Worker
from tests.kit.clusters import SPACE, Cluster, cluster, eventually, looking
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import TINY
from tests.kit.workers import connected

KEYS = [bytes([number]) * 32 for number in range(4)]
BLOCKS = [bytes([number]) * 5000 for number in range(4)]
AS_CHAIN = ChunkKeys(SPACE, np.empty(0, np.uint32), b"".join(block_address(SPACE, key) for key in KEYS))
PATHS = ("embedded", "grpc", "tcp", "shared")


@pytest.fixture
def c(tmp_root: Path) -> Iterator[Cluster]:
    with cluster(PosixRoot(str(tmp_root))) as made:
        yield made


@pytest.fixture(params=PATHS)
def cache(request: pytest.FixtureRequest, c: Cluster) -> Iterator[Cache]:
    """Blocks of a node of the cluster, reached in one way."""
    with ExitStack() as undo:
        member = c.node()
        if request.param == "embedded":
            yield Store(LocalTransport(member)).namespace(SPACE.name, TINY)
            return
        worker = Worker(member, "127.0.0.1:0")
        undo.callback(worker.stop)
        worker.start()
        store = undo.enter_context(connected(worker.address, bulk=request.param))
        yield store.namespace(SPACE.name, TINY)


def test_held_blocks_outlive_sweeps_and_are_read_meanwhile_and_afterwards(c: Cluster, cache: Cache) -> None:
    assert all(cache.blocks.put(KEYS, BLOCKS))
    hold = cache.blocks.hold(KEYS, ttl=60)
    assert hold.present == [True] * 4
    look = looking(c.members[0], AS_CHAIN)
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(AS_CHAIN)))
    sweep.start()
    eventually(lambda: not cache.blocks.match(KEYS))
    buffers = [bytearray(5000) for _ in KEYS]
    assert cache.blocks.get(KEYS, buffers) == [False] * 4, "condemned: a miss for everybody else"
    assert cache.blocks.present(KEYS) == [False] * 4
    assert cache.blocks.hold(KEYS).present == [False] * 4
    assert hold.get(KEYS, buffers) == [True] * 4
    c.members[0].node.holds.release(look)
    sweep.join(PATIENCE_S)
    assert not sweep.is_alive() and c.present(AS_CHAIN) == 4
    buffers = [bytearray(5000) for _ in KEYS]
    assert hold.get(KEYS, buffers) == [True] * 4
    assert [bytes(buffer) for buffer in buffers] == BLOCKS
    hold.release()
    eventually(lambda: c.collector().sweep(c.plans(AS_CHAIN)).reaped.count == 4)
    with pytest.raises(HoldBroken):
        hold.get(KEYS, buffers)


def test_a_sweep_waits_for_a_look_that_goes_on(c: Cluster) -> None:
    """Rule A2: until the look has ended nobody knows what the hold is on."""
    node, seen = c.node(), list[int]()
    cache = Store(LocalTransport(node)).namespace(SPACE.name, TINY)
    cache.blocks.put(KEYS, BLOCKS)
    real = node.node.blocks._present

    def present(asked: BlockKeys, deadline: Deadline, **how: bool) -> list[bool]:
        found = real(asked, deadline, **how)
        sweep.start()
        eventually(lambda: node.node.gc_view.leading(AS_CHAIN) == 0)
        sweep.join(0.3)
        seen.append(c.present(AS_CHAIN))
        return found

    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(AS_CHAIN)))
    with patch.object(node.node.blocks, "_present", present):
        hold = cache.blocks.hold(KEYS)
    sweep.join(PATIENCE_S)
    assert seen == [4] and hold.present == [True] * 4 and c.present(AS_CHAIN) == 4
    hold.release()


def test_blocks_that_were_condemned_before_the_hold_are_not_present(c: Cluster, cache: Cache) -> None:
    """Rule H2: the hold is taken before the look, so unprotected blocks are not found either."""
    cache.blocks.put(KEYS, BLOCKS)
    first = looking(c.members[0], AS_CHAIN)
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(AS_CHAIN)))
    sweep.start()
    eventually(lambda: not cache.blocks.match(KEYS))
    assert cache.blocks.hold(KEYS).present == [False] * 4
    c.members[0].node.holds.release(first)
    sweep.join(PATIENCE_S)
    assert not c.present(AS_CHAIN)


def test_a_hold_that_its_node_lost_is_broken(c: Cluster, cache: Cache) -> None:
    cache.blocks.put(KEYS, BLOCKS)
    hold = cache.blocks.hold(KEYS)
    c.members[0].node.holds.drop_protecting()
    with pytest.raises(HoldBroken):
        hold.get(KEYS, [bytearray(5000) for _ in KEYS])
    hold.release()


@pytest.mark.parametrize("path", PATHS[1:])
def test_a_hold_whose_worker_died_is_broken(c: Cluster, path: str) -> None:
    worker = Worker(c.node(), "127.0.0.1:0")
    worker.start()
    with connected(worker.address, bulk=path) as store:
        cache = store.namespace(SPACE.name, TINY)
        try:
            cache.blocks.put(KEYS, BLOCKS)
            hold = cache.blocks.hold(KEYS)
        finally:
            worker.stop()
        with pytest.raises(HoldBroken, match="match again"):
            hold.get(KEYS, [bytearray(5000) for _ in KEYS])
        hold.release()
        lost = cache.blocks.hold(KEYS)
        assert lost.present == [False] * 4
        assert lost.get(KEYS, [bytearray(5000) for _ in KEYS]) == [False] * 4


@pytest.mark.parametrize("path", PATHS[1:])
def test_what_a_worker_refuses_of_holds_of_blocks(c: Cluster, path: str) -> None:
    worker = Worker(c.node(), "127.0.0.1:0")
    worker.start()
    try:
        with connected(worker.address, bulk=path) as store:
            store.namespace(SPACE.name, TINY).blocks.put(KEYS, BLOCKS)
            other = store.namespace("other", TINY).blocks
            endpoint = store._port.endpoints.every()[0]  # type: ignore[attr-defined]

            def hold(request: pb.HoldRequest) -> bytes:
                return pb.HoldResponse.FromString(endpoint.stub("Hold")(sealed(request), timeout=PATIENCE_S)).hold

            with pytest.raises(grpc.RpcError, match="expected one of them"):
                hold(pb.HoldRequest(namespace=SPACE.digest, keys=pack_keys(KEYS), tokens=bytes(4)))
            other.put(KEYS, BLOCKS)
            kept = other.hold(KEYS)
            held = kept._held
            assert held.read(KEYS, [memoryview(bytearray(5000)) for _ in KEYS]) == [True] * 4
            held._hold_id = hold(pb.HoldRequest(namespace=SPACE.digest, keys=pack_keys(KEYS)))  # type: ignore[attr-defined]
            assert held.read(KEYS, [memoryview(bytearray(5000)) for _ in KEYS]) == [False] * 4, "of another namespace"
            kept.release()
    finally:
        worker.stop()
