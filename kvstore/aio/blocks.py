"""Engine-hashed blocks, for asyncio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from kvstore.aio.pins import Pin
from kvstore.aio.plans import Plan
from kvstore.aio.twins import Opening, Twin, awaited, finished
from kvstore.client import blocks, pin


class BlockHold(Twin[blocks.BlockHold]):
    """As ``kvstore.client.blocks.BlockHold``."""

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
    """As ``kvstore.client.blocks.BlockCache``."""

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
