"""The store for asyncio: each call does what its synchronous twin does, and one that is cancelled leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore import aio, errors
from kvstore.aio import THREADS, Threads
from kvstore.aio import Store as AioStore
from kvstore.census.selection import Selection
from kvstore.client import cache, operation, store
from kvstore.client import cache as blocks
from kvstore.client import cache as pins
from kvstore.client.pool import Bulk
from kvstore.engine.settings import Limits
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.segments import segments
from tests.kit.cases import for_each
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import NEVER_S, PATIENCE_S, eventually
from tests.kit.stores import TINY, kv_of, store_on
from tests.kit.workers import serving

TOKENS = np.arange(6 * TINY.chunk_tokens)
KV = kv_of(TINY, TOKENS)
PATIENT = Limits(read_deadline_s=PATIENCE_S, match_deadline_s=PATIENCE_S, stall_s=NEVER_S)
KEYS, BLOCKS = [bytes([at]) * 16 for at in range(3)], [bytes([at]) * 64 for at in range(3)]


@asynccontextmanager
async def opened(way: str, root: Path) -> AsyncIterator[aio.Store]:
    if way == "embedded":
        async with aio.open(str(root)) as found:
            yield found
        return
    with serving(root) as served:
        async with aio.connect(served.address, bulk=Bulk.of(way)) as found:
            yield found


@for_each("way", ["embedded", "shared", "tcp", "grpc"])
def test_every_call_does_what_its_twin_does(tmp_root: Path, way: str) -> None:
    async def use() -> None:
        async with opened(way, tmp_root) as found:
            cache = await found.namespace("m", TINY)
            assert (await cache.put(TOKENS, KV)).chunks_written == 6
            assert await cache.match(TOKENS) == len(TOKENS)
            count, got = await cache.get(TOKENS)
            assert count == len(TOKENS) and np.array_equal(got, KV)
            out = np.zeros_like(KV)
            assert await cache.get(TOKENS, out) == len(TOKENS) and np.array_equal(out, KV)
            async with cache.hold(TOKENS) as hold:
                assert hold.tokens == len(TOKENS)
                layers = [(layer, k.copy(), v.copy()) async for layer, k, v in hold.layers()]
                assert [layer for layer, _, _ in layers] == [*range(TINY.layers)]
                assert all(np.array_equal(k, KV[layer, 0]) for layer, k, _ in layers)
                assert np.array_equal(np.concatenate(await hold.view(), axis=2), KV)
                assert await hold.read_into(out) == len(TOKENS)
            hold = await cache.hold(TOKENS)
            await hold.release()
            assert await cache.blocks.put(KEYS, BLOCKS) == [True] * 3
            assert await cache.blocks.match(KEYS) == 3
            async with cache.blocks.hold(KEYS) as held:
                buffers = [bytearray(64) for _ in KEYS]
                assert held.present == [True] * 3 and await held.get(KEYS, buffers) == [True] * 3
                assert buffers == BLOCKS
            with pytest.raises(errors.InvalidRequest):
                await cache.get(TOKENS, np.zeros(3))
            async with cache.pin(TOKENS) as pin:
                assert pin.tokens == len(TOKENS) and await cache.refcount(TOKENS) == 1
            assert await cache.refcount(TOKENS) == 0
            assert (await found.stats())["requests_put"] >= 1
            assert (await cache.clear()).chunks >= 6

    asyncio.run(use())
    assert not any(thread.name.startswith("kvstore-aio") and not thread.daemon for thread in _others())


def _others() -> list[threading.Thread]:
    """Threads of a store that was closed end once they are not needed."""
    eventually(lambda: not any(each.name.startswith("kvstore-aio") for each in threading.enumerate()))
    return [each for each in threading.enumerate() if each is not threading.main_thread()]


@for_each(
    "here, there",
    [
        (aio.Store, store.Store),
        (aio.Cache, cache.Cache),
        (aio.Hold, cache.Hold),
        (aio.Pin, pins.Pin),
        (aio.BlockCache, blocks.BlockCache),
        (aio.BlockHold, blocks.BlockHold),
        (aio.Operation, operation.Operation),
        (aio.Segments, segments.Segments),
        (aio.Held, segments.Held),
    ],
)
def test_every_name_has_its_twin(here: type, there: type) -> None:
    public = {name for name in vars(there) if not name.startswith("_")}
    missing = public - set(dir(here))
    assert not missing


def test_workers_are_steered(tmp_root: Path) -> None:
    async def use() -> None:
        async with opened("grpc", tmp_root) as found:
            space = await found.namespace("m", TINY)
            await space.put(TOKENS, KV)
            assert len(await found.stats_each()) == 1
            operation = await found.clear(Selection(namespace=space.namespace.digest), dry_run=True)
            assert await operation.wait() and operation.counts["chunks"] == 6
            assert [each.id for each in await found.operations()] == [operation.id]
            assert await space.match(TOKENS) == len(TOKENS)

    asyncio.run(use())


def test_the_loop_goes_on_while_the_root_hangs_and_no_byte_comes_after_a_cancel() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    hang = Hang(after_bytes=16)

    async def use(found: aio.Store) -> None:
        space = await found.namespace("m", TINY)
        await space.put(TOKENS, KV)
        root.set_rules([Rule("read", hang)])
        out = np.zeros_like(KV)
        reading = asyncio.create_task(space.get(TOKENS, out))
        assert await asyncio.to_thread(hang.reached.wait, PATIENCE_S)
        reading.cancel()
        for _ in range(3):  # again and again, as nested timeouts do
            await asyncio.sleep(0.01)
            reading.cancel()
        assert not reading.done(), "it still writes into the caller's memory"
        hang.release.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        out[:] = 7
        await asyncio.sleep(0.1)
        assert (out == 7).all()

    with store_on(root, limits=PATIENT) as inner:
        asyncio.run(use(AioStore(inner, Threads())))


def test_a_hold_that_was_cancelled_is_released() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    hang = Hang()

    async def use(found: aio.Store) -> None:
        space = await found.namespace("m", TINY)
        await space.put(TOKENS, KV)
        root.set_rules([Rule("stat", hang)])
        holding = asyncio.ensure_future(space.hold(TOKENS + 1))
        undone = asyncio.create_task(found._threads.run(hang.release.wait, lambda _: 1 / 0))
        assert await asyncio.to_thread(hang.reached.wait, PATIENCE_S)
        holding.cancel()
        undone.cancel()
        await asyncio.sleep(0.01)
        hang.release.set()
        for cancelled in (holding, undone):
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        assert (await found.stats())["holds"] == 0

    with store_on(root, limits=PATIENT) as inner:
        asyncio.run(use(AioStore(inner, Threads())))


def test_being_cancelled_does_not_keep_a_hold_from_being_released(tmp_root: Path) -> None:
    async def use() -> None:
        async with aio.open(str(tmp_root)) as found:
            cache = await found.namespace("m", TINY)
            await cache.put(TOKENS, KV)
            hold = await cache.hold(TOKENS)
            gate = threading.Event()
            threads = hold._threads
            waiting = [asyncio.create_task(threads.run(gate.wait)) for _ in range(THREADS)]
            releasing = asyncio.create_task(hold.release())
            await asyncio.sleep(0.01)  # all threads wait, so it has not begun
            releasing.cancel()
            await asyncio.sleep(0.01)
            gate.set()
            await asyncio.gather(*waiting)
            with pytest.raises(asyncio.CancelledError):
                await releasing
            assert (await found.stats())["holds"] == 0
            gate.clear()
            waiting = [asyncio.create_task(threads.run(gate.wait)) for _ in range(THREADS)]
            await asyncio.sleep(0.01)
            await found.close()  # needs none of the threads, which all wait
            gate.set()
            await asyncio.gather(*waiting)

    asyncio.run(use())
