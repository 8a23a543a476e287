"""The store for programs with asyncio: the names of ``kvstore``, each call awaited.

    async with kvstore.aio.connect("127.0.0.1:8100") as store:
        cache = await store.namespace("llama", layout)
        async with cache.hold(tokens) as hold:
            async for layer, k, v in hold.layers():
                ...

Calls run on a few threads of the store, which wait for memory, disks and workers in place of the event loop. The work
itself is done in C and in the kernel, without the GIL. A call that is cancelled ends first: see ``Threads.run``.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from kvstore import batch, client
from kvstore.batch import Group
from kvstore.batch import run as runs
from kvstore.client import cache, operation, store
from kvstore.core.address import Tokens
from kvstore.core.buffers import KvArray
from kvstore.core.executor import Owner
from kvstore.core.operations import OperationState, OperationStatus
from kvstore.core.validate import checked_timeout
from kvstore.segments import Match, segments

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
        self._owner = Owner()
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
                    with suppress(Exception):  # the task is to know that it was cancelled
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
        if self._owner.is_here:
            self._pool.shutdown(wait=False)

    def _begun(self, call: Callable[[], T]) -> Future[T]:
        if not self.closed and self._owner.is_here:
            return self._pool.submit(contextvars.copy_context().run, call)
        # The store is closed, or its parent's: the call ends immediately, with an error or with nothing to do.
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


# The bases of the classes for asyncio: each has a synchronous twin, whose methods it runs on the store's threads.


class Releasable(Protocol):
    """An object that is released."""

    def release(self) -> object: ...


C = TypeVar("C", bound=AbstractAsyncContextManager[Any])
L = TypeVar("L", bound=Releasable)


class Twin(Generic[T]):
    """An object for asyncio, and its synchronous twin."""

    def __init__(self, twin: T, threads: Threads) -> None:
        self._twin = twin
        self._threads = threads

    def __repr__(self) -> str:
        return f"<asyncio {self._twin!r}>"

    async def __aenter__(self) -> Self:
        return self


class Lease(Twin[L]):
    """An object to release. Cancelling the task does not prevent that."""

    async def release(self) -> None:
        """Ends it. Idempotent."""
        await self._threads.finish(self._twin.release)

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


def leased(
    kind: Callable[[L, Threads], C], method: Callable[Concatenate[S, P], L]
) -> Callable[Concatenate[Twin[S], P], Opening[C]]:
    """Returns a method of the twin whose result, as the class ``kind``, is awaited or entered with ``async with``.

    What is taken is released if the task is cancelled before it is wrapped.
    """

    @functools.wraps(method)
    def call(self: Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> Opening[C]:
        async def taken() -> C:
            taking = partial(method, self._twin, *args, **kwargs)
            return kind(await self._threads.run(taking, lambda made: made.release()), self._threads)

        return Opening(taken())

    return call


class Attribute(Generic[S, R]):
    """An attribute of the twin, read in place."""

    def __init__(self, read: Callable[[S], R]) -> None:
        self._read = read

    def __get__(self, instance: Twin[S], owner: type | None = None) -> R:
        return self._read(instance._twin)


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

    async def __aexit__(self, *raised: Any) -> None:
        if self._made is not None:
            await self._made.__aexit__(*raised)


# The classes of ``kvstore``.


class Operation(Twin[operation.Operation]):
    """As ``kvstore.Operation``, but its attributes are those of the last ``wait``: ``await wait(0)`` asks again."""

    last = Attribute[operation.Operation, OperationStatus](lambda twin: twin.last)
    id = Attribute[operation.Operation, str](lambda twin: twin.id)
    state = Attribute[operation.Operation, OperationState](lambda twin: twin.last.state)
    done = Attribute[operation.Operation, int](lambda twin: twin.last.done)
    total = Attribute[operation.Operation, int](lambda twin: twin.last.total)
    message = Attribute[operation.Operation, str](lambda twin: twin.last.message)
    counts = Attribute[operation.Operation, Mapping[str, int]](lambda twin: twin.last.counts)

    async def wait(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as the synchronous one
        """As the synchronous one. A task that is cancelled stops waiting soon, and the operation continues."""
        seconds = checked_timeout(timeout)
        ends_s = float("inf") if seconds is None else time.monotonic() + seconds
        pause_s = STEP_S / 64
        while not await self._threads.run(partial(self._twin.wait, 0)):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(left_s, pause_s))  # a thread that waited would be missing for other calls
            pause_s = min(2 * pause_s, STEP_S)
        return True

    cancel = awaited(operation.Operation.cancel)


def _operations(found: list[operation.Operation], threads: Threads) -> list[Operation]:
    return [Operation(each, threads) for each in found]


class Taken(Twin[runs.LeasedGroup]):
    """As ``kvstore.batch.LeasedGroup``."""

    group = Attribute[runs.LeasedGroup, Group](lambda twin: twin.group)

    async def done(self) -> None:
        """As the synchronous one; also if the task is cancelled before that began."""
        await self._threads.finish(self._twin.done)

    async def give_back(self) -> None:
        """As the synchronous one; also if the task is cancelled before that began."""
        await self._threads.finish(self._twin.give_back)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await (self.done() if kind is None else self.give_back())


class Run(Twin[runs.Run]):
    """As ``kvstore.Run``; its consumers are tasks. A group is given back if its task ends."""

    is_over = Attribute[runs.Run, bool](lambda twin: twin.is_over)
    failed = Attribute[runs.Run, list[Group]](lambda twin: twin.failed)

    async def take(self) -> Taken | None:
        """Takes the next group, for this task; None once all groups are done. Use it with ``async with``."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        pause_s = STEP_S / 64
        while not self._twin.is_over:
            taking = partial(self._twin.try_take, 0.0, lambda: not task.done())
            taken = await self._threads.run(taking, _given_back)
            if taken is not None:
                return Taken(taken, self._threads)
            await asyncio.sleep(pause_s)  # a thread that waited would be missing for other calls
            pause_s = min(2 * pause_s, runs.LOOK_S)
        return None

    async def __aiter__(self) -> AsyncIterator[Group]:
        """Yields groups. The one before is done when the next is asked for."""
        while (taken := await self.take()) is not None:
            async with taken:
                yield taken.group

    async def close(self) -> None:
        """As the synchronous one; also if the task is cancelled before that began."""
        await self._threads.finish(self._twin.close)

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _given_back(taken: runs.LeasedGroup | None) -> None:
    """Undoes a take whose task was cancelled."""
    if taken is not None:
        taken.give_back()


@dataclass(frozen=True, slots=True, repr=False)
class Plan(batch.Plan):
    """As ``kvstore.Plan``."""

    threads: Threads = field(compare=False)
    """The store's threads."""

    @classmethod
    def of(cls, plan: batch.Plan, threads: Threads) -> Plan:
        """The twin of a plan."""
        return cls(**{each.name: getattr(plan, each.name) for each in fields(batch.Plan)}, threads=threads)

    def run(self, *, ahead: int = 2, attempts: int = 3) -> Run:  # type: ignore[override]  # the same, awaited
        """As the synchronous one: ``async with plan.run() as run: async for group in run: ...``."""
        return Run(runs.Run(self, ahead, attempts), self.threads)


class Held(Lease[segments.Held]):
    """As ``kvstore.Held``. Use it by one task."""

    matches = Attribute[segments.Held, list[Match]](lambda twin: twin.matches)
    read_into = awaited(segments.Held.read_into)


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
    hold = leased(Held, segments.Segments.hold)


class Pin(Lease[cache.Pin]):
    """As ``kvstore.client.Pin``."""

    id = Attribute[cache.Pin, str](lambda twin: twin.id)
    tokens = Attribute[cache.Pin, int](lambda twin: twin.tokens)


class BlockHold(Lease[cache.BlockHold]):
    """As ``kvstore.client.cache.BlockHold``."""

    present = Attribute[cache.BlockHold, list[bool]](lambda twin: twin.present)
    get = awaited(cache.BlockHold.get)


class BlockCache(Twin[cache.BlockCache]):
    """As ``kvstore.client.cache.BlockCache``."""

    put = awaited(cache.BlockCache.put)
    match = awaited(cache.BlockCache.match)
    present = awaited(cache.BlockCache.present)
    get = awaited(cache.BlockCache.get)
    hold = leased(BlockHold, cache.BlockCache.hold)
    pin = leased(Pin, cache.BlockCache.pin)


class Hold(Lease[cache.Hold]):
    """As ``kvstore.client.Hold``. Use it by one task."""

    tokens = Attribute[cache.Hold, int](lambda twin: twin.tokens)
    read_into = awaited(cache.Hold.read_into)
    view = awaited(cache.Hold.view)

    async def layers(self, out: Sequence[KvArray] | None = None) -> AsyncIterator[tuple[int, KvArray, KvArray]]:
        """Yields ``(layer, k, v)`` as the synchronous method does, and reads the next layers concurrently."""
        layers = self._twin.layers(out)
        try:
            while (layer := await self._threads.run(lambda: next(layers, None))) is not None:
                yield layer
        finally:
            if isinstance(layers, Generator):
                await self._threads.run(layers.close)


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
    prefetch = wrapped(Operation, cache.Cache.prefetch)
    evict_first = awaited(cache.Cache.evict_first)
    clear = awaited(cache.Cache.clear)
    plan = wrapped(Plan.of, cache.Cache.plan)
    segments = wrapped(Segments, cache.Cache.segments)
    hold = leased(Hold, cache.Cache.hold)
    pin = leased(Pin, cache.Cache.pin)

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


class Store(Twin[store.Store]):
    """As ``kvstore.Store``. Close it, or use it with ``async with``."""

    namespace = wrapped(Cache, store.Store.namespace)
    namespaces = awaited(store.Store.namespaces)
    pins = awaited(store.Store.pins)
    unpin = awaited(store.Store.unpin)
    clear = wrapped(Operation, store.Store.clear)

    operations = wrapped(_operations, store.Store.operations)
    stats = awaited(store.Store.stats)
    stats_each = awaited(store.Store.stats_each)

    async def close(self) -> None:
        """Ends holds, session, threads and connections. Idempotent."""
        if not self._threads.closed:
            await Threads(1).run(self._twin.close)  # not behind the calls that it ends
            self._threads.close()

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
