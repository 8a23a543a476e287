"""Counts of what is done, and histograms of how long steps take: the numbers behind ``stats()``, metrics and p99s.

With tracing on, each step is also a span of its request.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from kvstore.core import tracing
from kvstore.core.metrics import Counts, NodeCount

K = TypeVar("K", bound=Hashable)

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)

TierName = Literal["memory", "peers", "disk", "root"]
Operation = Literal["look", "read", "write"]
Step = tuple[TierName, Operation]


@dataclass(slots=True)
class Latency:
    """Durations of one kind of step: a count per bucket (the last: longer than all), their sum, and their bytes."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    sum_s: float = 0.0
    size_bytes: int = 0


class Latencies(Generic[K]):
    """One ``Latency`` per key; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[K, Latency] = {}

    def observe(self, key: K, seconds: float, size_bytes: int = 0) -> None:
        with self._lock:
            latency = self._found.get(key)
            if latency is None:
                latency = self._found[key] = Latency()
            latency.buckets[bisect.bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
            latency.sum_s += seconds
            latency.size_bytes += size_bytes

    def snapshot(self) -> dict[K, Latency]:
        with self._lock:
            return {key: Latency(list(one.buckets), one.sum_s, one.size_bytes) for key, one in self._found.items()}


class Timed:
    """One step of a tier. A class, not a generator, because it is entered for every group of chunks."""

    __slots__ = ("_began_s", "_key", "_latencies", "_span", "size_bytes")

    def __init__(self, latencies: Latencies[Step], key: Step) -> None:
        self._latencies = latencies
        self._key = key
        self.size_bytes = 0

    def __enter__(self) -> Timed:
        self._span: AbstractContextManager[Any] | None = None
        if tracing.is_on():
            self._span = tracing.span(".".join(("kvstore", *self._key)))
            self._span.__enter__()
        self._began_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._latencies.observe(self._key, time.perf_counter() - self._began_s, self.size_bytes)
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)


class Counters(Counts[NodeCount]):
    """The counts of a node since it started."""

    def __init__(self) -> None:
        super().__init__(NodeCount)
        self.tiers: Latencies[Step] = Latencies()
        """Steps of the tiers: how often, how long, how many bytes."""

    def timed(self, tier: TierName, operation: Operation) -> Timed:
        """Times one step of a tier; set its ``size_bytes`` to the bytes that were moved."""
        return Timed(self.tiers, (tier, operation))

    def add_read(self, payload_bytes: int, chunks: int = 1) -> None:
        """Adds ``chunks`` that a caller got from the root, of ``payload_bytes`` in all."""
        with self._lock:
            self._counts[NodeCount.CHUNKS_READ] += chunks
            self._counts[NodeCount.BYTES_READ] += payload_bytes

    def add_lookup(self, asked: int, found: int, chunk_tokens: int, *, is_match: bool) -> None:
        """Counts a look-up for ``asked`` chunks or blocks: a match, a hold, or a get without a hold."""
        with self._lock:
            self._counts[NodeCount.TOKENS_ASKED] += asked * chunk_tokens
            self._counts[NodeCount.TOKENS_MATCHED] += found * chunk_tokens
            self._counts[NodeCount.REQUESTS_MATCH] += is_match
