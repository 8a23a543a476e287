"""A bus in memory: a copy takes place as late as may be, when somebody waits for it, or at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvstore.connectors.transformers import device


class Bus:
    """A stream whose copies wait until their event is waited for, or do not wait."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._waiting: list[Callable[[], object]] = []
        self._events: list[Event] = []

    def copy(self, target: Any, source: Any) -> None:
        if self._is_late:
            self._waiting.append(lambda: target.copy_(source))
        else:
            target.copy_(source)

    def event(self, _: object = None) -> Any:
        mine, self._waiting = self._waiting, []
        made = Event(mine)
        self._events.append(made)
        return made

    def wait_stream(self, _: object) -> None:
        pass

    def wait_event(self, _: object) -> None:
        """A device waits by itself, later."""

    def finish(self) -> None:
        """Lets everything arrive."""
        for event in self._events:
            event.synchronize()


class Event:
    def __init__(self, copies: list[Callable[[], object]]) -> None:
        self._copies = copies

    def synchronize(self) -> None:
        while self._copies:
            self._copies.pop(0)()


class Pinned(torch.Tensor):  # type: ignore[misc]
    """Memory whose copies that do not block go over the bus."""

    bus: Bus

    def to(self, *_: object, non_blocking: bool = False) -> Any:
        assert non_blocking
        arriving = torch.zeros(self.shape, dtype=self.dtype)
        self.bus.copy(arriving, self.as_subclass(torch.Tensor))
        return arriving

    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking
        self.bus.copy(self.as_subclass(torch.Tensor), source)
        return self


def bus_in_memory(monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> Bus:
    """Puts one in the place of CUDA's."""
    made = Bus(is_late=is_late)
    monkeypatch.setattr(Pinned, "bus", made, raising=False)
    monkeypatch.setattr(device, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype).as_subclass(Pinned))
    monkeypatch.setattr(device, "_event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return made
