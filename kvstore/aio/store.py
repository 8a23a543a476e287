"""``open`` and ``connect`` for asyncio, and the classes of ``kvstore`` with each call awaited.

Calls of an event loop run on a few threads that wait for memory, disks and workers in its place. The work itself is
done in C and in the kernel, without the GIL.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from kvstore import batch, client
from kvstore.batch import Group
from kvstore.batch import run as runs
from kvstore.client import cache, control, operation, store
from kvstore.core.address import Tokens
from kvstore.core.buffers import KvArray
from kvstore.core.operations import OperationState, OperationStatus
from kvstore.core.validate import checked_timeout
from kvstore.segments import CHUNK_TOKENS, Match, Rope, segments

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


# The bases of the classes for asyncio: each has a synchronous twin, whose methods it runs on the store's threads.


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


# The classes of ``kvstore``.


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
            if await self._threads.run(partial(self._twin.wait, min(left_s, STEP_S))):
                return True
            if time.monotonic() >= ends_s:
                return False

    cancel = awaited(operation.Operation.cancel)


class Taken(Twin[runs.LeasedGroup]):
    """As ``kvstore.batch.LeasedGroup``."""

    @property
    def group(self) -> Group:
        """The group."""
        return self._twin.group

    done = awaited(runs.LeasedGroup.done)
    give_back = awaited(runs.LeasedGroup.give_back)

    async def __aenter__(self) -> Taken:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await (self.done() if kind is None else self.give_back())


class Run(Twin[runs.Run]):
    """As ``kvstore.Run``; its consumers are tasks. A group is given back if its task ends."""

    @property
    def is_over(self) -> bool:
        """True once every group is done or has failed, or the run was closed."""
        return self._twin.is_over

    @property
    def failed(self) -> list[Group]:
        """Groups that were given back too often; their members may have run in part."""
        return self._twin.failed

    async def take(self) -> Taken | None:
        """Takes the next group, for this task; None once all groups are done. Use it with ``async with``."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        while not self._twin.is_over:
            # In steps: a thread of the store waits for each.
            taking = partial(self._twin.try_take, runs.LOOK_S, lambda: not task.done())
            taken = await self._threads.run(taking, _given_back)
            if taken is not None:
                return Taken(taken, self._threads)
        return None

    async def __aiter__(self) -> AsyncIterator[Group]:
        """Yields groups. The one before is done when the next is asked for."""
        while (taken := await self.take()) is not None:
            async with taken:
                yield taken.group

    close = awaited(runs.Run.close)

    async def __aenter__(self) -> Run:
        return self

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

    @property
    def matches(self) -> list[Match]:
        """The ranges that are held."""
        return self._twin.matches

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

    def find_held(
        self, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0, ttl: float | None = None
    ) -> Opening[Held]:
        """Finds and protects segments; await it, or use it with ``async with``."""
        return self._lease(Held, partial(self._twin.find_held, tokens, starts, after, ttl))

    def hold(self, matches: Sequence[Match], ttl: float | None = None) -> Opening[Held]:
        """Protects found segments; await it, or use it with ``async with``."""
        return self._lease(Held, partial(self._twin.hold, matches, ttl))


class Pin(Lease[cache.Pin]):
    """As ``kvstore.client.Pin``."""

    @property
    def id(self) -> str:
        """The id that ``kvstore unpin`` takes; empty if nothing was pinned."""
        return self._twin.id

    @property
    def tokens(self) -> int:
        """Leading tokens that are pinned."""
        return self._twin.tokens


class BlockHold(Lease[cache.BlockHold]):
    """As ``kvstore.client.cache.BlockHold``."""

    @property
    def present(self) -> list[bool]:
        """For each key that was held, True if its block is there."""
        return self._twin.present

    get = awaited(cache.BlockHold.get)


class BlockCache(Twin[cache.BlockCache]):
    """As ``kvstore.client.cache.BlockCache``."""

    put = awaited(cache.BlockCache.put)
    put_new = awaited(cache.BlockCache.put_new)
    match = awaited(cache.BlockCache.match)
    present = awaited(cache.BlockCache.present)
    get = awaited(cache.BlockCache.get)
    supersede = awaited(cache.BlockCache.supersede)

    def hold(self, keys: Sequence[bytes], ttl: float | None = None) -> Opening[BlockHold]:
        """As that of the synchronous one; await it, or use it with ``async with``."""
        return self._lease(BlockHold, partial(self._twin.hold, keys, ttl))

    def pin(self, keys: Sequence[bytes], ttl: float = 3600.0, owner: str = "") -> Opening[Pin]:
        """As that of the synchronous one; await it, or use it with ``async with``."""
        return self._lease(Pin, partial(self._twin.pin, keys, ttl, owner))


class Hold(Lease[cache.Hold]):
    """As ``kvstore.client.Hold``. Use it by one task."""

    @property
    def tokens(self) -> int:
        """Leading tokens that are held."""
        return self._twin.tokens

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

    async def plan(self, prompts: Iterable[Tokens], *, memory_tokens: int) -> Plan:
        """As the synchronous one; a run of the plan hands its groups to tasks."""
        making = partial(self._twin.plan, prompts, memory_tokens=memory_tokens)
        return Plan.of(await self._threads.run(making), self._threads)

    async def segments(self, rope: Rope, *, chunk_tokens: int = CHUNK_TOKENS) -> Segments:
        """As the synchronous one."""
        making = partial(self._twin.segments, rope, chunk_tokens=chunk_tokens)
        return Segments(await self._threads.run(making), self._threads)

    def hold(self, tokens: Tokens, ttl: float | None = None, *, counts: bool = True) -> Opening[Hold]:
        """Holds the longest stored prefix; await it, or use it with ``async with``."""
        return self._lease(Hold, partial(self._twin.hold, tokens, ttl, counts=counts))

    def pin(self, tokens: Tokens, ttl: float = 3600.0, owner: str = "") -> Opening[Pin]:
        """Pins the longest stored prefix; await it, or use it with ``async with``."""
        return self._lease(Pin, partial(self._twin.pin, tokens, ttl, owner))


class Control(Twin[control.Control]):
    """As ``kvstore.client.control.Control``. Made by ``Store.control``."""

    def workers(self) -> list[str]:
        """The addresses of all workers."""
        return self._twin.workers()

    lookup = awaited(control.Control.lookup)


class Store(Twin[store.Store]):
    """As ``kvstore.Store``. Close it, or use it with ``async with``."""

    namespace = wrapped(Cache, store.Store.namespace)
    namespaces = awaited(store.Store.namespaces)
    pins = awaited(store.Store.pins)
    unpin = awaited(store.Store.unpin)
    clear = wrapped(Operation, store.Store.clear)

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
