"""Faults by position: the n-th call to a root or a metadata store fails, whatever that call is.

One ``Steps`` counts the calls of several objects, so that a position names one step of a whole operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from kvstore.errors import Unavailable

ROOT = frozenset(
    "stage publish discard open stat look touch move replace make_folder remove remove_if remove_folder list".split()
)
META = frozenset("get list count txn put delete grant keep_alive revoke".split())


class Strike(Enum):
    """The fault of a step."""

    BEFORE = "unavailable, without effect"
    AFTER = "takes effect, then unavailable"


class Steps:
    """Counts calls inside ``armed``, and strikes the chosen one.

    Background threads are counted as well: a position may differ between runs, and every position is tried.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target = 0
        self._act: Strike | Callable[[], object] = Strike.BEFORE
        self.is_armed = False
        self.count = 0
        self._only = ""
        self.struck = ""
        """The struck call; empty if the operation ended before it."""
        self.has_ended = False
        """The struck call has returned or raised."""

    @contextmanager
    def armed(self, position: int, act: Strike | Callable[[], object], only: str = "") -> Iterator[None]:
        """Strikes the call at ``position`` (from 1) inside the context, or calls ``act`` before it.

        ``only`` is the beginning of the calls that count, such as ``remove chunks/``.
        """
        with self._lock:
            self._target, self._act, self._only = position, act, only
            self.count, self.struck, self.has_ended, self.is_armed = 0, "", False, True
        try:
            yield
        finally:
            with self._lock:
                self.is_armed = False

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Makes one call, with its fault if it is the chosen one."""
        with self._lock:
            is_target = False
            if self.is_armed and name.startswith(self._only):
                self.count += 1
                is_target = self.count == self._target
            if is_target:
                self.struck = name
            act = self._act
        if not is_target:
            return call()
        try:
            if act is Strike.AFTER:
                call()
            if isinstance(act, Strike):
                raise Unavailable(f"{name}: {act.value} (injected)")
            act()
            return call()
        finally:
            self.has_ended = True


class Stepped:
    """Any object whose calls of some methods are counted and struck; everything else is the object's."""

    def __init__(self, inner: Any, steps: Steps, methods: frozenset[str]) -> None:
        self._inner = inner
        self._steps = steps
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._methods:
            return value

        def call(*arguments: Any, **keywords: Any) -> Any:
            label = " ".join([name, *(str(each) for each in arguments[:1] if isinstance(each, str))])
            return self._steps.run(label, lambda: value(*arguments, **keywords))

        return call
