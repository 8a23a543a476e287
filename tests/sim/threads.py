"""Replacements for ``threading`` and ``queue`` in production code, over actors of the kernel.

So threads, locks, events and queues of nodes and collectors run unchanged, in the order that the seed gives. Only the
parts that are used exist here.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from unittest.mock import patch

from tests.sim.kernel import Actor, Kernel

T = TypeVar("T")

_current: list[Kernel] = []

THREADED = (
    "kvstore.core.executor",
    "kvstore.host.tables",
    "kvstore.engine.host",
    "kvstore.meta.follower",
    "kvstore.meta.session",
    "kvstore.engine.gc_state",
    "kvstore.engine.capacity",
    "kvstore.engine.chunk_store",
    "kvstore.engine.clear",
    "kvstore.engine.follower",
    "kvstore.engine.open",
    "kvstore.engine.coordination",
    "kvstore_gc.threads",
    "kvstore_gc.capacity",
)
"""The modules that start threads, or hold locks while they call the root or the metadata."""


def kernel() -> Kernel:
    """The kernel of the run in progress."""
    return _current[-1]


class _Waiters:
    """Actors that wait for something to change."""

    def __init__(self) -> None:
        self._actors: list[Actor] = []

    def wait(self, holds: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits until ``holds()``; returns False if time was up first."""
        at = kernel()
        ends_s = math.inf if timeout_s is None else at.now_s + max(0.0, timeout_s)
        while not holds():
            if at.now_s >= ends_s:
                at.give_way()  # who asks again and again must not keep everybody else from running
                return holds()
            actor = at.current
            if actor is not None:
                self._actors.append(actor)
            at.block(ends_s)
        return True

    def wake(self) -> None:
        """Makes them look again."""
        actors, self._actors = self._actors, []
        for actor in actors:
            kernel().wake(actor)


class Lock:
    """``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._held:
            if not blocking:
                return False
            if not self._waiters.wait(lambda: not self._held, None if timeout < 0 else timeout):
                return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._waiters.wake()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = _Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or self._waiters.wait(self.is_set, timeout)


class Condition:
    """``threading.Condition``; its lock is never held while others could run, so there is none."""

    def __init__(self) -> None:
        self._waiters = _Waiters()
        self._notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        before = self._notified
        return self._waiters.wait(lambda: self._notified != before, timeout)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> bool:
        return self._waiters.wait(lambda: bool(predicate()), timeout)

    def notify_all(self) -> None:
        self._notified += 1
        self._waiters.wake()

    def __enter__(self) -> None:
        """Nothing to take."""

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""


class Thread:
    """``threading.Thread``, in the process of the actor that starts it."""

    def __init__(
        self, target: Callable[..., object], args: Sequence[Any] = (), name: str = "thread", daemon: bool = False
    ) -> None:
        self._work = lambda: target(*args)
        self.name = name.replace("kvstore-", "")
        self._actor: Actor | None = None
        self._waiters = _Waiters()

    def start(self) -> None:
        at = kernel()
        assert at.current is not None, "threads are started by actors"
        self._actor = at.spawn(at.current.process, self.name, self._run, at.current.weight)
        self._actor.thread = self

    def join(self, timeout: float | None = None) -> None:
        self._waiters.wait(lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.ended

    def _run(self) -> None:
        try:
            self._work()  # type: ignore[no-untyped-call]
        finally:
            if self._actor is not None:
                self._actor.ended = True
            self._waiters.wake()


def current_thread() -> object:
    """``threading.current_thread``."""
    actor = kernel().current
    return actor.thread if actor else None


class Full(Exception):
    """``queue.Full``."""


class Queue(Generic[T]):
    """``queue.Queue`` and ``queue.SimpleQueue``."""

    def __init__(self, maxsize: int = 0) -> None:
        self._maxsize = maxsize
        self._items: deque[T] = deque()
        self._undone = 0
        self._waiters = _Waiters()

    def put(self, item: T, timeout: float | None = None) -> None:
        if not self._waiters.wait(lambda: not self._is_full, timeout):
            raise Full
        self.put_nowait(item)

    def put_nowait(self, item: T) -> None:
        if self._is_full:
            raise Full
        self._items.append(item)
        self._undone += 1
        self._waiters.wake()

    def get(self) -> T:
        self._waiters.wait(lambda: bool(self._items), None)
        item = self._items.popleft()
        self._waiters.wake()
        return item

    def qsize(self) -> int:
        return len(self._items)

    def task_done(self) -> None:
        self._undone -= 1
        self._waiters.wake()

    def join(self) -> None:
        self._waiters.wait(lambda: not self._undone, None)

    @property
    def _is_full(self) -> bool:
        return 0 < self._maxsize <= len(self._items)


class NowClock:
    """``SystemClock``, for deadlines that are made without a clock."""

    def now_s(self) -> float:
        return kernel().now_s

    def monotonic_s(self) -> float:
        return kernel().now_s


_THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=Condition,  # also never held while others could run
    Event=Event,
    Condition=Condition,
    Thread=Thread,
    current_thread=current_thread,
)
_QUEUE = SimpleNamespace(Queue=Queue, SimpleQueue=Queue, Full=Full)
_TIME = SimpleNamespace(monotonic=lambda: kernel().now_s)
_REPLACED = {"threading": _THREADING, "queue": _QUEUE}
_TIMED = ("kvstore.engine.capacity",)
"""The modules whose own time decides what they do."""


@contextmanager
def installed(at: Kernel) -> Iterator[None]:
    """Production code runs on actors of ``at``."""
    with ExitStack() as undo:
        for module in map(importlib.import_module, THREADED):
            for name in _REPLACED.keys() & vars(module).keys():
                undo.enter_context(patch.object(module, name, _REPLACED[name]))
        for name in _TIMED:
            undo.enter_context(patch(f"{name}.time", _TIME))
        undo.enter_context(patch("kvstore.meta.store.SystemClock", NowClock))
        undo.enter_context(patch("kvstore.root.inspect.READ_BYTES", 4096))  # files are tiny here, and buffers many
        _current.append(at)
        undo.callback(_current.pop)
        yield
