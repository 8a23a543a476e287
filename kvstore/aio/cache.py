"""KV of one namespace, holds and pins, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from functools import partial
from typing import overload

from kvstore.aio.operation import begins
from kvstore.aio.plans import Plan
from kvstore.aio.segments import Segments
from kvstore.aio.threads import Threads
from kvstore.aio.twins import Opening, Twin, awaited, finished
from kvstore.buffers import KvArray
from kvstore.client import cache
from kvstore.client import cache as blocks
from kvstore.client import cache as pin
from kvstore.client import cache as pins
from kvstore.segments import CHUNK_TOKENS, Rope
from kvstore.tokens import Tokens

# A pin, for asyncio.


class Pin(Twin[pin.Pin]):
    """As ``kvstore.client.Pin``."""

    @property
    def id(self) -> str:
        """The id that ``kvstore unpin`` takes; empty if nothing was pinned."""
        return self._twin.id

    @property
    def tokens(self) -> int:
        """Leading tokens that are pinned."""
        return self._twin.tokens

    release = finished(pin.Pin.release)

    async def __aenter__(self) -> Pin:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


# Engine-hashed blocks, for asyncio.


class BlockHold(Twin[blocks.BlockHold]):
    """As ``kvstore.client.cache.BlockHold``."""

    @property
    def present(self) -> list[bool]:
        """For each key that was held, True if its block is there."""
        return self._twin.present

    get = awaited(blocks.BlockHold.get)
    release = finished(blocks.BlockHold.release)

    async def __aenter__(self) -> BlockHold:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class BlockCache(Twin[blocks.BlockCache]):
    """As ``kvstore.client.cache.BlockCache``."""

    put = awaited(blocks.BlockCache.put)
    put_new = awaited(blocks.BlockCache.put_new)
    match = awaited(blocks.BlockCache.match)
    present = awaited(blocks.BlockCache.present)
    get = awaited(blocks.BlockCache.get)
    supersede = awaited(blocks.BlockCache.supersede)

    async def plan(
        self,
        prompts: Iterable[Sequence[bytes]],
        *,
        memory_tokens: int,
        decode_tokens: int | Sequence[int | None] | None = None,
    ) -> Plan:
        """As the synchronous one; a run of the plan hands its groups to tasks."""
        making = partial(self._twin.plan, prompts, memory_tokens=memory_tokens, decode_tokens=decode_tokens)
        return Plan.of(await self._threads.run(making), self._threads)

    def hold(self, keys: Sequence[bytes], ttl: float | None = None) -> Opening[BlockHold]:
        """As that of the synchronous one; await it, or use it with ``async with``."""
        return Opening(self._hold(keys, ttl))

    def pin(self, keys: Sequence[bytes], ttl: float = 3600.0, owner: str = "") -> Opening[Pin]:
        """As that of the synchronous one; await it, or use it with ``async with``."""
        return Opening(self._pin(keys, ttl, owner))

    async def _pin(self, keys: Sequence[bytes], ttl: float, owner: str) -> Pin:
        return Pin(await self._threads.run(partial(self._twin.pin, keys, ttl, owner), pin.Pin.release), self._threads)

    async def _hold(self, keys: Sequence[bytes], ttl: float | None) -> BlockHold:
        held = await self._threads.run(partial(self._twin.hold, keys, ttl), blocks.BlockHold.release)
        return BlockHold(held, self._threads)


class Hold(Twin[cache.Hold]):
    """As ``kvstore.client.Hold``. Use it by one task."""

    @property
    def tokens(self) -> int:
        """Leading tokens that are held."""
        return self._twin.tokens

    read_into = awaited(cache.Hold.read_into)
    view = awaited(cache.Hold.view)
    release = finished(cache.Hold.release)

    async def layers(self, out: Sequence[KvArray] | None = None) -> AsyncIterator[tuple[int, KvArray, KvArray]]:
        """Yields ``(layer, k, v)`` as the synchronous one does, the next ones being read meanwhile."""
        layers = self._twin.layers(out)
        try:
            while (layer := await self._threads.run(lambda: next(layers, None))) is not None:
                yield layer
        finally:
            if isinstance(layers, Generator):
                await self._threads.run(layers.close)

    async def __aenter__(self) -> Hold:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class Cache(Twin[cache.Cache]):
    """As ``kvstore.client.Cache``. Made by ``Store.namespace``."""

    def __init__(self, twin: cache.Cache, threads: Threads) -> None:
        super().__init__(twin, threads)
        self.namespace = twin.namespace
        self.layout = twin.layout
        self.blocks = BlockCache(twin.blocks, threads)

    put = awaited(cache.Cache.put)
    match = awaited(cache.Cache.match)
    match_each = awaited(cache.Cache.match_each)
    refcount = awaited(cache.Cache.refcount)
    prefetch = begins(cache.Cache.prefetch)
    evict_first = awaited(cache.Cache.evict_first)
    supersede = awaited(cache.Cache.supersede)
    clear = awaited(cache.Cache.clear)

    @overload
    async def get(self, tokens: Tokens) -> tuple[int, KvArray]: ...

    @overload
    async def get(self, tokens: Tokens, out: KvArray) -> int: ...

    async def get(self, tokens: Tokens, out: KvArray | None = None) -> tuple[int, KvArray] | int:
        """Reads the longest stored prefix, every byte verified, as the synchronous one does.

        ``out`` is not touched after this has ended, also if it is cancelled.
        """
        if out is None:
            return await self._threads.run(lambda: self._twin.get(tokens))
        return await self._threads.run(lambda: self._twin.get(tokens, out))

    async def plan(
        self, prompts: Iterable[Tokens], *, memory_tokens: int, decode_tokens: int | Sequence[int | None] | None = None
    ) -> Plan:
        """As the synchronous one; a run of the plan hands its groups to tasks."""
        making = partial(self._twin.plan, prompts, memory_tokens=memory_tokens, decode_tokens=decode_tokens)
        return Plan.of(await self._threads.run(making), self._threads)

    async def segments(self, rope: Rope, *, chunk_tokens: int = CHUNK_TOKENS) -> Segments:
        """As the synchronous one."""
        making = partial(self._twin.segments, rope, chunk_tokens=chunk_tokens)
        return Segments(await self._threads.run(making), self._threads)

    def hold(self, tokens: Tokens, ttl: float | None = None, *, counts: bool = True) -> Opening[Hold]:
        """Holds the longest stored prefix; await it, or use it with ``async with``."""
        return Opening(self._hold(partial(self._twin.hold, tokens, ttl, counts=counts)))

    def pin(self, tokens: Tokens, ttl: float = 3600.0, owner: str = "") -> Opening[Pin]:
        """Pins the longest stored prefix; await it, or use it with ``async with``."""
        return Opening(self._pin(tokens, ttl, owner))

    async def _hold(self, taking: Callable[[], cache.Hold]) -> Hold:
        held = await self._threads.run(taking, cache.Hold.release)
        return Hold(held, self._threads)

    async def _pin(self, tokens: Tokens, ttl: float, owner: str) -> Pin:
        pin = await self._threads.run(partial(self._twin.pin, tokens, ttl, owner), pins.Pin.release)
        return Pin(pin, self._threads)
