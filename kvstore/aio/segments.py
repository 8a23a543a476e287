"""Segments, for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.aio.threads import Threads
from kvstore.aio.twins import Opening, Twin, awaited, finished
from kvstore.segments import Match, segments
from kvstore.tokens import Tokens


class Held(Twin[segments.Held]):
    """As ``kvstore.Held``. Use it by one task."""

    @property
    def matches(self) -> list[Match]:
        """The ranges that are held."""
        return self._twin.matches

    read_into = awaited(segments.Held.read_into)
    release = finished(segments.Held.release)

    async def __aenter__(self) -> Held:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class Segments(Twin[segments.Segments]):
    """As ``kvstore.Segments``."""

    def __init__(self, twin: segments.Segments, threads: Threads) -> None:
        super().__init__(twin, threads)
        self.namespace = twin.namespace
        self.layout = twin.layout
        self.rope = twin.rope
        self.fingerprint = twin.fingerprint

    put = awaited(segments.Segments.put)
    find = awaited(segments.Segments.find)
    record = awaited(segments.Segments.record)
    verdict = awaited(segments.Segments.verdict)

    def missing(
        self, tokens: Tokens, matches: Sequence[Match], starts: Sequence[int] | None = None, after: int = 0
    ) -> list[range]:
        """As the synchronous one; it asks nobody."""
        return self._twin.missing(tokens, matches, starts, after)

    def find_held(
        self, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0, ttl: float | None = None
    ) -> Opening[Held]:
        """Finds and protects segments; await it, or use it with ``async with``."""
        return Opening(self._held(partial(self._twin.find_held, tokens, starts, after, ttl)))

    def hold(self, matches: Sequence[Match], ttl: float | None = None) -> Opening[Held]:
        """Protects found segments; await it, or use it with ``async with``."""
        return Opening(self._held(partial(self._twin.hold, matches, ttl)))

    async def _held(self, taking: Callable[[], segments.Held]) -> Held:
        held = await self._threads.run(taking, segments.Held.release)
        return Held(held, self._threads)
