"""Who may come in: so many calls and bytes at once, and nobody once the worker drains; and the memory for the bytes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.buffers import aligned
from kvstore.text import size
from kvstore.wire.statuses import Busy, Draining


class Gate:
    """Counts the calls inside; thread-safe."""

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        """Limit on calls at once. May change at any time: calls inside stay."""
        self._changed = threading.Condition()  # guards calls under way, and whether the worker drains
        self._inside = 0
        self._draining = False

    @property
    def inside_count(self) -> int:
        """Number of calls inside now."""
        return self._inside

    @property
    def draining(self) -> bool:
        """True once it is closed for good."""
        return self._draining

    @contextmanager
    def passing(self, *, light: bool) -> Iterator[None]:
        """Lets one call in while it runs; a light one always. Raises Draining or Busy."""
        with self._changed:
            if not light:
                if self._draining:
                    raise Draining("the worker is draining and takes no new calls: use another worker")
                if self._inside >= self.calls_max:
                    raise Busy(f"the worker has {self.calls_max} calls in progress: back off, or use another worker")
                self._inside += 1
        try:
            yield
        finally:
            if not light:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Lets no more calls in. Idempotent."""
        with self._changed:
            self._draining = True

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits for the calls inside; returns True if all ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)


class BytesInFlight:
    """A bound on the memory that calls in progress use for payload; thread-safe.

    ``whose`` returns the tenant of the call that this thread serves; None if tenants are not told apart. One tenant
    gets at most half: a single call may claim all of it and then send nothing.
    """

    def __init__(self, bytes_max: int, whose: Callable[[], str | None] = lambda: None) -> None:
        self.bytes_max = bytes_max
        """Limit on bytes in flight. May change at any time: reserved bytes stay."""
        self._whose = whose
        self._lock = threading.Lock()  # guards bytes in flight, by tenant
        self._by_tenant: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Reserves bytes while they are used. Raises Busy if they are not free.

        A call may exceed the limit if it is alone: a limit below a chunk must not make the chunk unreachable. A
        tenant's only call may exceed half; it then counts as half, or it would keep others out.
        """
        tenant = self._whose()
        with self._lock:
            if tenant is not None:
                most = max(1, self.bytes_max // 2)
                needed, count = count, min(count, most)
                if self._by_tenant[tenant] and self._by_tenant[tenant] + count > most:
                    raise Busy(
                        f"this call needs {size(needed)}, which with the calls of tenant {tenant!r} in "
                        f"progress exceeds its share of {size(most)}: back off, or use another worker"
                    )
            if self.count and self.count + count > self.bytes_max:
                # Do not say how many are free: a reader of one tenant could watch by it what the others do (rule X7).
                raise Busy(
                    f"this call needs {size(count)}, which with the calls in progress exceeds the worker's "
                    f"limit of {size(self.bytes_max)}: back off, or use another worker"
                )
            self.count += count
            if tenant is not None:
                self._by_tenant[tenant] += count
        try:
            yield
        finally:
            with self._lock:
                self.count -= count
                if tenant is not None:
                    self._by_tenant[tenant] -= count
                    if not self._by_tenant[tenant]:
                        del self._by_tenant[tenant]


class Buffers:
    """Memory for bytes that come and go, by size: at most ``kept_bytes_max`` are kept for the next one who asks.

    Used again, because fresh memory has to be zeroed first, which costs about as much as copying into it. Thread-safe.
    """

    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of exactly this size, which begins at a page; its content is whatever it was."""
        with self._lock:
            free = self._free.get(size_bytes)
            if free:
                self._kept_bytes -= size_bytes
                return free.pop()
        return aligned(size_bytes)

    def give(self, buffer: memoryview) -> None:
        """Gives a buffer back, which nobody uses any more."""
        with self._lock:
            if self._kept_bytes + len(buffer) > self._kept_bytes_max:
                # Sizes that nobody asks for any more must not keep out those that are asked for.
                self._free.clear()
                self._kept_bytes = 0
            if len(buffer) <= self._kept_bytes_max:
                self._free.setdefault(len(buffer), []).append(buffer)
                self._kept_bytes += len(buffer)
