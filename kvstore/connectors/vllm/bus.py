"""The bus of a GPU: blocks go over it beside the engine's work, by way of device memory in which pages lie together.

One large copy takes a fraction of the time of many small ones. Those to and from pinned memory have streams of their
own, so that the engine's stream waits for none of them: it only gathers the pages that leave.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvstore.errors import Overloaded

PART_BYTES = 64 << 20
"""Size of one copy over the bus, and of what is put at once: large enough for the speed of the bus."""
OUTWARD_PARTS = 8
"""Parts on their way to the host: behind so many the engine's stream waits for the bus."""
INWARD_PARTS = 3
FULL_S = 10.0
"""Pause after the device had no memory for a part."""


class Part:
    """Device memory for one copy, and the event after which it may be used again."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.free = _event()

    def rows(self, like: Any) -> Any:
        """Returns its start as bytes of the shape of ``like``."""
        return self._memory[: like.numel()].view(like.shape)


class Parts:
    """Parts that are used in turn. They are allocated when they are first needed, and kept."""

    def __init__(self, device: Any, size_bytes: int, count_max: int) -> None:
        self._device = device
        self._size_bytes = size_bytes
        self._count_max = count_max
        self._parts: deque[Part] = deque()
        self._full_until_s = 0.0

    def take(self) -> Part:
        """Returns the next part, for which the current stream waits. Raises Overloaded if there is none at all."""
        if not self._parts or (len(self._parts) < self._count_max and not self._parts[0].free.query()):
            self._grow()
        if not self._parts:
            raise Overloaded(
                f"the GPU has no {self._size_bytes >> 20} MiB to spare for KV on its way: leave the engine less"
            )
        part = self._parts.popleft()
        self._parts.append(part)
        torch.cuda.current_stream(self._device).wait_event(part.free)
        return part

    def _grow(self) -> None:
        """Adds a part, unless the device had no memory for one just now: each try empties torch's own cache."""
        if time.monotonic() < self._full_until_s:
            return
        try:
            self._parts.appendleft(Part(torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device)))
        except torch.OutOfMemoryError:
            self._full_until_s = time.monotonic() + FULL_S


class Bus:
    """Both directions. Blocks go out on the engine's thread, and come in on any thread."""

    def __init__(self, device: Any, part_bytes: int) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        # With priority: the engine's kernels fill the device, and a scatter behind all of them would hold up the bus.
        self._scatters = torch.cuda.Stream(device, priority=-1)
        self._outward = Parts(device, part_bytes, OUTWARD_PARTS)
        self._inward = Parts(device, part_bytes, INWARD_PARTS)
        self._lock = threading.Lock()

    def now(self) -> Any:
        """Marks a moment in the work of the current stream."""
        moment = _event()
        moment.record(torch.cuda.current_stream(self._device))
        return moment

    def outward(self) -> Part:
        """Returns a part to gather in, on the current stream. Raises Overloaded if there is none."""
        return self._outward.take()

    def send(self, part: Part, host: Any) -> Any:
        """Begins to copy what the current stream gathers in ``part`` to pinned memory; returns the event of its end."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(part.rows(host), non_blocking=True)
            part.free = _event()
            part.free.record()
        return part.free

    @contextmanager
    def inward(self, source: Any, after: Any) -> Iterator[Any]:
        """Copies pinned memory to the device, and gives it to scatter from, behind the moment ``after``.

        Raises Overloaded if there is no memory for it.
        """
        with self._lock:
            with torch.cuda.stream(self._in):
                part = self._inward.take()
                part.rows(source).copy_(source, non_blocking=True)
            self._scatters.wait_stream(self._in)
            with torch.cuda.stream(self._scatters):
                self._scatters.wait_event(after)
                yield part.rows(source)
                part.free.record()

    def wait(self) -> None:
        """Waits until all that came in is where it belongs."""
        self._scatters.record_event(_event()).synchronize()


def _event() -> Any:
    """Returns an event that a thread waits for without keeping a core busy."""
    return torch.cuda.Event(blocking=True)
