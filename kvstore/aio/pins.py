"""A pin, for asyncio."""

from __future__ import annotations

from kvstore.aio.twins import Twin, finished
from kvstore.client import pin


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
