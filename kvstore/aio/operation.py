"""An operation, for asyncio."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvstore.aio.threads import STEP_S
from kvstore.aio.twins import Twin, awaited
from kvstore.checks import checked_timeout
from kvstore.client import operation
from kvstore.operations import OperationState, OperationStatus

P = ParamSpec("P")
S = TypeVar("S")


class Operation(Twin[operation.Operation]):
    """As ``kvstore.Operation``, but its attributes are those of the last ``wait``: ``await wait(0)`` asks again."""

    @property
    def last(self) -> OperationStatus:
        """All that is known of it, as last seen."""
        return self._twin.last

    @property
    def id(self) -> str:
        """The id for ``kvstore ops cancel``."""
        return self.last.id

    @property
    def state(self) -> OperationState:
        """The state as last seen."""
        return self.last.state

    @property
    def done(self) -> int:
        """Tokens prefetched, or shards visited, as last seen."""
        return self.last.done

    @property
    def total(self) -> int:
        """Tokens stored, or shards of the root; 0 while unknown."""
        return self.last.total

    @property
    def message(self) -> str:
        """The reason why it failed, was cancelled, or did not do all; else empty."""
        return self.last.message

    @property
    def counts(self) -> Mapping[str, int]:
        """The results so far by name, as last seen."""
        return self.last.counts

    async def wait(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as the synchronous one
        """As the synchronous one. A task that is cancelled stops waiting soon, and the operation continues."""
        seconds = checked_timeout(timeout)
        ends_s = float("inf") if seconds is None else time.monotonic() + seconds
        while True:
            left_s = max(0.0, ends_s - time.monotonic())
            if await self._threads.run(functools.partial(self._twin.wait, min(left_s, STEP_S))):
                return True
            if time.monotonic() >= ends_s:
                return False

    cancel = awaited(operation.Operation.cancel)


def begins(
    method: Callable[Concatenate[S, P], operation.Operation],
) -> Callable[Concatenate[Twin[S], P], Coroutine[Any, Any, Operation]]:
    """Returns a method of the twin that begins an operation, for asyncio."""

    @functools.wraps(method)
    async def call(self: Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> Operation:
        begun = await self._threads.run(functools.partial(method, self._twin, *args, **kwargs))
        return Operation(begun, self._threads)

    return call
