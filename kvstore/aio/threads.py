"""Calls of an event loop, on a few threads that wait for memory, disks and workers in its place.

The work itself is done in C and in the kernel, without the GIL. ``Twin`` is the base of all classes for asyncio.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")

THREADS = 16
"""Concurrent calls of one store; further calls wait for a thread."""
STEP_S = 0.5
"""Operations are waited for in steps, so that a waiting task can be cancelled."""


class Threads:
    """The threads of one store. They start as they are needed, and no more than ``count``."""

    def __init__(self, count: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="kvstore-aio")
        self.closed = False

    async def run(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Returns what ``call`` returns, or raises what it raises.

        If it is cancelled, the call goes on, and CancelledError comes once that has ended, which its deadline bounds:
        nothing is written into the caller's memory later. ``undo`` then takes back what it returned. A call that has
        not begun never does.
        """
        made: list[T] = []  # not the future's result: threads keep that for a while, and no caller can drop it
        job = self._begun(lambda: made.append(call()))
        ended = asyncio.wrap_future(job)
        try:
            await asyncio.shield(ended)
            return made.pop()
        except asyncio.CancelledError:
            if not job.cancel():
                await _wait(ended)
                if made and undo is not None:
                    await self.finish(partial(undo, made.pop()))
            raise

    async def finish(self, call: Callable[[], object]) -> None:
        """Calls what takes something back, also if it is cancelled before that began: CancelledError comes after it."""
        ended = asyncio.wrap_future(self._begun(call))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await _wait(ended)
            raise

    def close(self) -> None:
        """Ends the threads once their calls have ended. Idempotent."""
        self.closed = True
        self._pool.shutdown(wait=False)

    def _begun(self, call: Callable[[], T]) -> Future[T]:
        if not self.closed:
            return self._pool.submit(contextvars.copy_context().run, call)
        # The store is closed: the call ends immediately, with StoreClosed or with nothing to do.
        job = Future[T]()
        try:
            job.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised to the caller
            job.set_exception(error)
        return job


async def _wait(ended: asyncio.Future[T]) -> None:
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            continue  # again: the call has not ended for that
    if not ended.cancelled():
        ended.exception()  # no task awaits it: asyncio would log that it was never retrieved


# Classes for asyncio: each has a synchronous twin, whose methods it runs on the store's threads.


class Releasable(Protocol):
    """An object that is released."""

    def release(self) -> object: ...


class Closing(Protocol):
    """An object that ``async with`` can close."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


C = TypeVar("C", bound=Closing)
L = TypeVar("L", bound=Releasable)


class Twin(Generic[T]):
    """An object for asyncio, and its synchronous twin."""

    def __init__(self, twin: T, threads: Threads) -> None:
        self._twin = twin
        self._threads = threads

    def __repr__(self) -> str:
        return f"<asyncio {self._twin!r}>"

    def _lease(self, kind: Callable[[L, Threads], C], taking: Callable[[], L]) -> Opening[C]:
        """Wraps what ``taking`` returns, and releases it if the task is cancelled before it is wrapped."""

        async def taken() -> C:
            return kind(await self._threads.run(taking, lambda made: made.release()), self._threads)

        return Opening(taken())


class Lease(Twin[L]):
    """An object to release. Cancelling the task does not prevent that."""

    async def release(self) -> None:
        """Ends it. Idempotent."""
        await self._threads.finish(self._twin.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


def awaited(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Twin[S], P], Coroutine[Any, Any, R]]:
    """Returns a method of the twin for asyncio. Arguments, result and errors stay."""

    @functools.wraps(method)
    async def call(self: Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._threads.run(partial(method, self._twin, *args, **kwargs))

    return call


def wrapped(
    kind: Callable[[R, Threads], W], method: Callable[Concatenate[S, P], R]
) -> Callable[Concatenate[Twin[S], P], Coroutine[Any, Any, W]]:
    """Returns a method of the twin for asyncio, its result as the class ``kind``."""

    @functools.wraps(method)
    async def call(self: Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> W:
        return kind(await self._threads.run(partial(method, self._twin, *args, **kwargs)), self._threads)

    return call


class Opening(Generic[C]):
    """An object that is being made: await it, or enter it with ``async with``, which closes it."""

    def __init__(self, making: Coroutine[Any, Any, C]) -> None:
        self._making = making
        self._made: C | None = None

    def __repr__(self) -> str:
        return "<asyncio object that is not open yet: await it, or enter it with 'async with'>"

    def __await__(self) -> Generator[Any, None, C]:
        return self._making.__await__()

    async def __aenter__(self) -> C:
        self._made = await self._making
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)
