"""Prometheus metrics of a collector, over HTTP at ``/metrics``.

Their names are part of the interface: docs/metrics.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)

from kvstore.core.clock import Clock
from kvstore.core.http_server import HttpServer
from kvstore_gc.capacity import Pressure
from kvstore_gc.cycle import Cycle
from kvstore_gc.execute import SPARED
from kvstore_gc.leftovers import ORPHANS
from kvstore_gc.rank import VerdictReason
from kvstore_gc.summary import Summary

CHOSEN = [reason.value for reason in VerdictReason if reason.condemns]
KEPT = [reason.value for reason in VerdictReason if not reason.condemns]
OUTCOMES = ("done", "unfinished", "failed")
SWEEPS = ("begun", "adopted", "abandoned", "left")
PHASES = ("check", "survey", "plan", "condemn", "grace", "reap", "close", "orphans")
PHASE_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14_400)

# Without this each counter has a second series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one collector, in a registry of their own."""

    def __init__(self, pressure: Pressure, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self._pressure = pressure
        self._clock = clock
        for name, about in (
            ("used_bytes", "bytes that the root's files use"),
            ("capacity_bytes", "what the root's files may use; 0: not known"),
            ("target_bytes", "eviction keeps used bytes below this; 0: not known"),
        ):
            self._asked(name, about, partial(self._of_level, name))
        self._chunks = self._gauge("chunks", "chunks found by the last listing")
        self._kept = self._gauge("kept_bytes", "bytes of chunks that stay, by reason", "reason")
        self._blocked = self._gauge(
            "blocked_sweeps", "sweeps that the last round could not end: a node did not announce"
        )
        self._blocked.set(0)
        self._round = self._gauge(
            "last_round_timestamp_seconds",
            "when a round last ended, whatever its outcome; at first, when the collector started",
        )
        self._success = self._gauge("last_success_timestamp_seconds", "when a round last did everything it had to")
        self._chosen = self._counter("chosen_chunks", "chunks chosen to be deleted", "reason")
        self._chosen_bytes = self._counter("chosen_bytes", "bytes of chunks chosen to be deleted", "reason")
        self._reaped = self._counter("reaped_chunks", "chunks deleted")
        self._reaped_bytes = self._counter("reaped_bytes", "bytes of chunks deleted")
        self._spared = self._counter("spared_chunks", "chunks chosen and spared after all", "why")
        self._orphans = self._counter("orphans", "leftovers removed or put back", "kind")
        self._sweeps = self._counter("sweeps", "sweeps", "outcome")
        self._rounds = self._counter("rounds", "rounds", "outcome")
        self._phases = Histogram(
            "kvstore_gc_phase_seconds",
            "how long phases of a round took",
            ("phase",),
            buckets=PHASE_BUCKETS_S,
            registry=self.registry,
        )
        # At 0 from the start on, or Prometheus would not see the first one as an increase, and a panel would be empty.
        for metric, labels in (
            (self._rounds, OUTCOMES),
            (self._sweeps, SWEEPS),
            (self._chosen, CHOSEN),
            (self._chosen_bytes, CHOSEN),
            (self._kept, KEPT),
            (self._spared, SPARED),
            (self._orphans, ORPHANS),
            (self._phases, PHASES),
        ):
            for label in labels:
                metric.labels(label)

    def done(self, summary: Summary) -> None:
        """Adds a round that ended."""
        self._rounds.labels("unfinished" if summary.unfinished else "done").inc()
        self._round.set(self._clock.now_s())
        self._blocked.set(summary.sweeps["abandoned"] + summary.sweeps["left"])
        if not summary.unfinished:
            self._success.set(self._clock.now_s())
        if summary.is_listed:
            self._chunks.set(summary.scanned.count)
            for reason in KEPT:
                tally = summary.kept.get(reason)
                self._kept.labels(reason).set(tally.bytes if tally is not None else 0)
        for reason, tally in summary.chosen.items():
            self._chosen.labels(reason).inc(tally.count)
            self._chosen_bytes.labels(reason).inc(tally.bytes)
        self._reaped.inc(summary.reaped.count)
        self._reaped_bytes.inc(summary.reaped.bytes)
        for counter, counts in (
            (self._spared, summary.spared),
            (self._orphans, summary.orphans),
            (self._sweeps, summary.sweeps),
        ):
            for label, count in counts.items():
                counter.labels(label).inc(count)
        for phase, seconds in summary.seconds.items():
            self._phases.labels(phase).observe(seconds)

    def failed(self) -> None:
        """Counts a round that could not end."""
        self._rounds.labels("failed").inc()
        self._round.set(self._clock.now_s())

    def follow(self, interval_s: float, cycle: Cycle) -> None:
        """Adds the metrics of a collector that stays."""
        ProcessCollector(registry=self.registry)
        self._round.set(self._clock.now_s())  # none is late yet
        self._gauge("interval_seconds", "between two rounds").set(interval_s)
        self._asked(
            "waiting_seconds",
            "since sweeps in flight wait for nodes to announce them; 0: none waits",
            lambda: cycle.waiting_s,
        )
        pressure = self._pressure
        self._asked("silent_seconds", "since the root and etcd both answered, or refused", lambda: pressure.silent_s)
        self._asked("etcd_failing", "1 while etcd does not answer", lambda: pressure.etcd_fails)
        self._asked("full", "1 while nothing can be evicted, and nodes refuse puts", lambda: pressure.accounts.is_full)

    def _of_level(self, name: str) -> float:
        return float(getattr(self._pressure.level, name, 0))

    def _asked(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A gauge whose value is computed at each read."""
        self._gauge(name, about).set_function(lambda: float(value()))

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"kvstore_gc_{name}", about, labels, registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"kvstore_gc_{name}", about, labels, registry=self.registry)


def serve(metrics: Metrics, host: str, port: int) -> HttpServer:
    """Serves metrics over HTTP. Raises InvalidRequest if it cannot listen there."""
    return HttpServer(make_wsgi_app(metrics.registry), host, port)
