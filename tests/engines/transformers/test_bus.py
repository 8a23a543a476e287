"""Parts of GPU memory for KV on its way: as many as are needed and there is room for, and no more."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.connectors.vllm import gpu_copy
from kvstore.connectors.vllm.gpu_copy import Parts
from kvstore.errors import Overloaded


class Device:
    """Has room for so many parts; the copies from those in use never end."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tries = 0

    def empty(self, size: int, **_: Any) -> Any:
        self.tries += 1
        if not self.room:
            raise torch.OutOfMemoryError
        self.room -= 1
        return bytearray(size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    monkeypatch.setattr(gpu_copy, "_event", lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_event=lambda _: None))
    return now


def device(room: int, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(room)
    monkeypatch.setattr(torch, "empty", made.empty)
    return made


@pytest.mark.usefixtures("clock")
def test_there_are_no_more_parts_than_allowed_and_they_come_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, parts = device(9, monkeypatch), Parts(None, 8, 3)
    taken = [parts.take() for _ in range(9)]
    assert gpu.tries == 3 and taken[:3] == taken[3:6] == taken[6:] and len({*map(id, taken)}) == 3


def test_a_device_that_is_full_is_asked_again_only_after_a_while(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, parts = device(1, monkeypatch), Parts(None, 8, 3)
    assert len({id(parts.take()) for _ in range(50)}) == 1 and gpu.tries == 2
    gpu.room = 1
    clock.s += gpu_copy.FULL_S
    assert len({id(parts.take()) for _ in range(50)}) == 2


def test_without_any_memory_it_says_so_and_begins_once_there_is_some(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, parts = device(0, monkeypatch), Parts(None, 8, 3)
    for _ in range(50):
        with pytest.raises(Overloaded, match="leave the engine less"):
            parts.take()
    assert gpu.tries == 1
    gpu.room = 1
    clock.s += gpu_copy.FULL_S
    parts.take()
