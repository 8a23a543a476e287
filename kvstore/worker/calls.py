"""Around every call: lets it in, times it, and turns what it raises into a status. The rim of the worker."""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from kvstore.errors import KVStoreError
from kvstore.sources import Ids
from kvstore.wire.statuses import BrokenTransfer, Busy, Draining, Refusal, refusal
from kvstore.worker.admission import Gate

log = logging.getLogger(__name__)

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

WORKER_COUNTERS = {
    "wire_bytes_in": "payload bytes received from clients",
    "wire_bytes_out": "payload bytes sent to clients",
    "wire_damaged": "streams of clients that did not match their checksums",
    "calls_refused": "calls refused because the worker was full or draining",
    "calls_failed": "calls that ended by a defect of the worker (its log has the incident)",
    "calls_cancelled": "calls whose client was gone before the end",
    "calls_idle": "streams cancelled because their client moved nothing for too long, or never ended",
    "puts_deferred": "puts acknowledged when their bytes had come, and written behind",
    "puts_deferred_lost": "those of them that could not be written",
    "bulk_connections": "bulk connections of clients that proved their grant",
    "bulk_refused": "bulk connections cut off: no grant, too many, garbage, or too slow to greet",
}
"""Every counter of the worker itself, beside those of its node."""

WORKER_GAUGES = {
    "calls_in_flight": "calls under way",
    "bytes_in_flight": "payload bytes of calls under way",
    "client_holds": "holds of clients that have not ended",
    "bulk_connections_open": "bulk connections of clients that are open",
    "deferred_chunks": "chunks received that wait to be written",
    "draining": "1 while the worker finishes what it accepted and takes no more",
}
"""How things stand now with the worker itself, beside the gauges of its node."""


class CallContext(Protocol):
    """What a call knows of its client: gRPC's context, or that of the bulk protocol."""

    def time_remaining(self) -> float | None:
        """Seconds the client still waits; None where it did not say."""
        ...

    def is_active(self) -> bool:
        """Whether the client is there."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """What goes with a refusal."""
        ...

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Raises, so that the call ends with this status."""
        ...


@dataclass(slots=True)
class Latency:
    """How long the calls of one method took: a count per bucket (the last: longer than all), and their sum."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    sum_s: float = 0.0


class Calls:
    """What the worker did, call by call; thread-safe."""

    def __init__(self, gate: Gate, ids: Ids) -> None:
        self.gate = gate
        self._ids = ids
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(WORKER_COUNTERS, 0)
        self._ended: dict[tuple[str, str], int] = {}
        self._latencies: dict[str, Latency] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Adds to one of the worker's counters."""
        with self._lock:
            self._counters[name] += count

    def counters(self) -> dict[str, int]:
        """The worker's own counters."""
        with self._lock:
            return dict(self._counters)

    def ended(self) -> dict[tuple[str, str], int]:
        """Calls that ended, by method and status code."""
        with self._lock:
            return dict(self._ended)

    def latencies(self) -> dict[str, Latency]:
        """How long they took, by method."""
        with self._lock:
            return {name: Latency(list(each.buckets), each.sum_s) for name, each in self._latencies.items()}

    @contextmanager
    def serving(self, name: str, context: CallContext, *, light: bool = False) -> Iterator[None]:
        """Around the work of one call. What it raises becomes the call's status."""
        began_s = time.perf_counter()
        code = grpc.StatusCode.OK
        try:
            with self.gate.passing(light=light):
                yield
        except KVStoreError as error:
            refused = refusal(error)
            if context.is_active():
                code = refused.code
                self._note(error)
            else:
                # The client is gone, which may look like a stream that ended too early.
                code = grpc.StatusCode.CANCELLED
                self.add("calls_cancelled")
            _abort(context, refused)
        except (grpc.RpcError, GeneratorExit):
            # The client is gone, or our own watch cancelled the call: nobody reads a status.
            code = grpc.StatusCode.CANCELLED
            self.add("calls_cancelled")
            raise
        except Exception:
            # Everything else is a defect of ours. Its traceback is for the log: it may hold paths and tokens.
            code = grpc.StatusCode.INTERNAL
            incident = self._ids.fresh().hex()[:12]
            self.add("calls_failed")
            log.exception("call.failed method=%s incident=%s", name, incident)
            _abort(context, Refusal(code, f"the worker failed: look for incident {incident} in its log", ()))
        finally:
            self._observe(name, code, time.perf_counter() - began_s)

    def _note(self, error: KVStoreError) -> None:
        if isinstance(error, (Busy, Draining)):
            self.add("calls_refused")
        elif isinstance(error, BrokenTransfer):
            self.add("wire_damaged")

    def _observe(self, name: str, code: grpc.StatusCode, seconds: float) -> None:
        with self._lock:
            self._ended[name, code.name] = self._ended.get((name, code.name), 0) + 1
            latency = self._latencies.setdefault(name, Latency())
            latency.buckets[bisect.bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
            latency.sum_s += seconds


def seconds_left(context: CallContext, most_s: float) -> float:
    """What a step of the call may take: the worker's own limit, or most of what the client gave, to answer in time."""
    remaining_s = context.time_remaining()
    return most_s if remaining_s is None else max(0.001, min(most_s, 0.9 * remaining_s))


def _abort(context: CallContext, refused: Refusal) -> None:
    context.set_trailing_metadata(refused.trailers)
    context.abort(refused.code, refused.message)
