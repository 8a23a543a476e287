"""``open`` and ``connect`` for asyncio, and the store that they give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from kvstore import client
from kvstore.aio.cache import Cache
from kvstore.aio.control import Control
from kvstore.aio.operation import Operation, begins
from kvstore.aio.threads import Threads
from kvstore.aio.twins import Opening, Twin, awaited
from kvstore.client import store

P = ParamSpec("P")


def _caches(
    method: Callable[Concatenate[store.Store, P], client.Cache],
) -> Callable[Concatenate[Store, P], Coroutine[Any, Any, Cache]]:
    @functools.wraps(method)
    async def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> Cache:
        cache = await self._threads.run(functools.partial(method, self._twin, *args, **kwargs))
        return Cache(cache, self._threads)

    return call


class Store(Twin[store.Store]):
    """As ``kvstore.Store``. Close it, or use it with ``async with``."""

    namespace = _caches(store.Store.namespace)
    namespaces = awaited(store.Store.namespaces)
    pins = awaited(store.Store.pins)
    unpin = awaited(store.Store.unpin)
    clear = begins(store.Store.clear)

    async def operations(self) -> list[Operation]:
        """As the synchronous one."""
        return [Operation(each, self._threads) for each in await self._threads.run(self._twin.operations)]

    stats = awaited(store.Store.stats)
    stats_each = awaited(store.Store.stats_each)

    @property
    def control(self) -> Control:
        """As the synchronous one."""
        return Control(self._twin.control, self._threads)

    async def close(self) -> None:
        """Ends holds, session, threads and connections. Idempotent."""
        if not self._threads.closed:
            await self._threads.run(self._twin.close)
            self._threads.close()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _opens(make: Callable[P, store.Store]) -> Callable[P, Opening[Store]]:
    @functools.wraps(make)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Opening[Store]:
        return Opening(_opened(functools.partial(make, *args, **kwargs)))

    return begin


async def _opened(make: Callable[[], store.Store]) -> Store:
    threads = Threads()
    try:
        return Store(await threads.run(make, store.Store.close), threads)
    except BaseException:
        threads.close()
        raise


open = _opens(client.open)
connect = _opens(client.connect)
