"""Calls of an event loop, on a few threads that wait for memory, disks and workers in its place.

The work itself is done in C and in the kernel, without the GIL.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

THREADS = 16
"""Calls of one store at once; the next ones wait for a thread."""
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
        made: list[T] = []  # not the future's result: threads keep that for a while, and nobody would drop it
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
        # The store is closed: the call ends at once, with StoreClosed or with nothing to do.
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
        ended.exception()  # nobody waits for it: asyncio would print that it was never retrieved
