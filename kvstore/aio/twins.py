"""The base of all classes here: each has a synchronous twin, whose methods it runs on the store's threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from kvstore.aio.threads import Threads

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class Twin(Generic[T_co]):
    """An object for asyncio, and its synchronous twin."""

    def __init__(self, twin: T_co, threads: Threads) -> None:
        self._twin = twin
        self._threads = threads

    def __repr__(self) -> str:
        return f"<asyncio {self._twin!r}>"


def awaited(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Twin[S], P], Coroutine[Any, Any, R]]:
    """Returns a method of the twin for asyncio. Arguments, result and errors stay."""

    @functools.wraps(method)
    async def call(self: Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._threads.run(functools.partial(method, self._twin, *args, **kwargs))

    return call


def finished(method: Callable[[S], object]) -> Callable[[Twin[S]], Coroutine[Any, Any, None]]:
    """Returns a method of the twin that takes something back: being cancelled does not keep it from that."""

    @functools.wraps(method)
    async def call(self: Twin[S], /) -> None:
        await self._threads.finish(functools.partial(method, self._twin))

    return call


class Closing(Protocol):
    """An object that ``async with`` can close."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


C = TypeVar("C", bound=Closing)


class Opening(Coroutine[Any, Any, C], Generic[C]):
    """An object that is being made: await it, make it a task, or enter it with ``async with``, which closes it."""

    def __init__(self, making: Coroutine[Any, Any, C]) -> None:
        self._making = making
        self._made: C | None = None

    def __repr__(self) -> str:
        state = "is not open yet: await it, or enter it with 'async with'"
        return f"<asyncio {getattr(self._making, '__qualname__', 'object').lstrip('_')} {state}>"

    def __await__(self) -> Generator[Any, None, C]:
        return self._making.__await__()

    def send(self, value: Any) -> Any:
        """Goes on with the making, as a task does."""
        return self._making.send(value)

    def throw(self, *error: Any) -> Any:
        """Cancels the making, as a task does."""
        return self._making.throw(*error)

    def close(self) -> None:
        """Gives up the making."""
        self._making.close()

    if not TYPE_CHECKING:  # where a checker knows the type, it says so itself

        def __getattr__(self, name: str) -> Any:
            if name.startswith("cr_") or name in ("__name__", "__qualname__"):
                return getattr(self._making, name)  # for the texts and the stack of a task
            raise AttributeError(f"{name}: this is not open yet: await it, or enter it with 'async with'")

    async def __aenter__(self) -> C:
        self._made = await self._making
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)
