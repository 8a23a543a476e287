"""Finds locks that are taken against their order, which may end in a deadlock, in every test.

Each lock of kvstore is wrapped when it is made, and known by the line that makes it. While a thread holds a lock, it
may wait for one of its own or a lower layer. Layers are those of the import contracts (pyproject.toml); modules outside
of packages are the lowest. Within a layer the first test that takes two locks sets their order for its process.
A lock may be taken in any order if the attempt gives up (``blocking=False`` or a timeout). Semaphores are not checked.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SETTINGS = Path(__file__).resolve().parents[2] / "pyproject.toml"
_held = threading.local()
violations: list[str] = []
"""What went wrong so far, in any thread; a test that leaves some fails."""


class Site(NamedTuple):
    """A line that makes locks."""

    name: str
    layer: int


class Order:
    """The order of locks, learned from the pairs that threads hold together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards changes of the pairs
        self._after: dict[Site, dict[Site, str]] = {}

    def check(self, outer: Site, inner: Site) -> str | None:
        """Returns why ``inner`` must not be taken while ``outer`` is held; None if it may be."""
        if inner in self._after.get(outer, ()):
            return None
        broken = f"{inner.name} is taken while {outer.name} is held"
        if inner.layer < outer.layer:
            return f"{broken}, which is of a lower layer"
        with self._lock:
            if path := self._path(inner, outer):
                pairs = [f"{b.name} while {a.name} is held, in {self._after[a][b]}" for a, b in pairwise(path)]
                return "; ".join([broken, *pairs])
            self._after.setdefault(outer, {})[inner] = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        return None

    def _path(self, start: Site, end: Site) -> list[Site]:
        """Locks from ``start`` to ``end``, each of which was taken while the one before was held."""
        paths, sites = {start: [start]}, [start]
        for site in sites:
            for after in self._after.get(site, ()):
                if after not in paths:
                    paths[after] = [*paths[site], after]
                    sites.append(after)
        return paths.get(end, [])


_order = Order()


@cache
def layers() -> dict[str, int]:
    """The layer of each package, 0 the uppermost, as the import contracts have them."""
    contracts = tomllib.loads(SETTINGS.read_text())["tool"]["importlinter"]["contracts"]
    (lines,) = (each["layers"] for each in contracts if each.get("containers") == ["kvstore"])
    return {package: at for at, line in enumerate(lines) for package in re.findall(r"\w+", line)}


@cache
def site_of(module: str, line: int) -> Site | None:
    """The site at a line of a module; None outside of kvstore."""
    package, _, rest = module.partition(".")
    if package not in ("kvstore", "kvstore_gc"):
        return None
    lowest = len(layers())
    layer = layers().get(rest.partition(".")[0], lowest) if package == "kvstore" else -1
    return Site(f"{module}:{line}", layer)


def _site_at(frame: FrameType) -> Site | None:
    """Returns the site of a lock that is made at a frame; None outside of kvstore."""
    return site_of(frame.f_globals.get("__name__", ""), frame.f_lineno)


def _taking(site: Site, lock: object) -> None:
    """Called before a thread waits for a lock."""
    held = _stack()
    if any(each is lock for _, each in held):
        return  # a condition, entered again
    for outer, _ in held:
        if (broken := _order.check(outer, site)) is not None:
            violations.append(broken)


def _took(site: Site, lock: object) -> None:
    _stack().append((site, lock))


def _left(lock: object) -> None:
    held = _stack()
    for at in range(len(held) - 1, -1, -1):
        if held[at][1] is lock:
            del held[at]
            return


def _stack() -> list[tuple[Site, object]]:
    try:
        found: list[tuple[Site, object]] = _held.stack
    except AttributeError:
        found = _held.stack = []
    return found


class OrderedLock:
    """A lock of kvstore; ``inner`` is the real one."""

    __slots__ = ("_inner", "_site")

    def __init__(self, site: Site, inner: Any) -> None:
        self._site = site
        self._inner = inner

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout == -1:
            _taking(self._site, self)  # an attempt that gives up causes no deadlock
        done: bool = self._inner.acquire(blocking, timeout)
        if done:
            _took(self._site, self)
        return done

    def release(self) -> None:
        self._inner.release()
        _left(self)

    def locked(self) -> bool:
        return bool(self._inner.locked())

    # Written out: most locks are taken so, thousands of times in a test.

    def __enter__(self) -> None:
        stack = _stack()
        if stack:
            _taking(self._site, self)
        self._inner.acquire()
        stack.append((self._site, self))

    def __exit__(self, *_: object) -> None:
        self._inner.release()
        stack = _stack()
        if stack and stack[-1][1] is self:
            stack.pop()
        else:
            _left(self)

    # For ``threading.Condition``, over a lock that may be entered more than once.

    def _is_owned(self) -> bool:
        return bool(self._inner._is_owned())

    def _release_save(self) -> Any:
        while any(each is self for _, each in _stack()):
            _left(self)
        return self._inner._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._inner._acquire_restore(state)
        for _ in range(state[0]):  # an RLock's count
            _took(self._site, self)


def install() -> None:
    """Has kvstore make locks that keep an order from now on. To be called before it is imported."""
    make_lock, make_condition, make_inner = threading.Lock, threading.Condition, threading.RLock

    def lock() -> Any:
        site = _site_at(sys._getframe(1))
        return make_lock() if site is None else OrderedLock(site, make_lock())

    class Condition(make_condition):  # type: ignore[misc, valid-type]
        def __init__(self, lock: Any = None) -> None:
            site = _site_at(sys._getframe(1)) if lock is None else None
            super().__init__(lock if site is None else OrderedLock(site, make_inner()))

    threading.Lock = lock  # type: ignore[assignment]
    threading.Condition = Condition  # type: ignore[misc]
