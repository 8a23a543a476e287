"""A collector put together and running: a single cycle, or cycles until a signal comes.

The work runs on a thread of its own. The main thread waits for signals, and notices a root that hangs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import KVStoreError, RootMismatch, Unavailable
from kvstore.host.tables import check_left
from kvstore.meta.cluster import check_bound
from kvstore.meta.store import MetadataStore
from kvstore.root.identity import read_identity
from kvstore.root.open import open_root
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.membership import Collectors
from kvstore_gc.site import Site
from kvstore_gc.summary import Summary
from kvstore_gc.threads import THREADS_COUNT, OutageLog, Stop, Stopped, Task, Threads, within

if TYPE_CHECKING:
    from kvstore_gc.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 30.0
LISTEN_S = 0.2
LEAVE_S = 5.0
"""Time for a cycle to leave its work when a signal came."""
LOOK_S = 0.05
"""Time between two looks at the level while nothing is evicted."""
RETRY_S_MIN = 1.0
RETRY_S_MAX = 30.0
"""Pause after a cycle that failed, doubled each time."""


@contextmanager
def opened(url: str, options: Mapping[str, Any], etcd: MetadataStore) -> Iterator[Site]:
    """The root at ``url``, which must be one, and which ``etcd`` must not know as another. Closes both afterwards.

    Raises RootMismatch, Unavailable, and what opening a root raises.
    """
    with ExitStack() as undo:
        undo.callback(etcd.close)
        root = within(OPEN_S, f"the root {url}", lambda: open_root(url, options, create=False))
        undo.callback(root.close)
        identity = within(OPEN_S, f"the root {url}", lambda: read_identity(root))
        if identity is None:
            raise RootMismatch(f"{root.url} is not a kvstore root: it has no FORMAT file. Is the file system mounted?")
        check_bound(etcd, root.url, identity.root)
        within(OPEN_S, f"the root {url}", lambda: check_left(root))
        yield Site(root, identity, etcd)


class CycleScheduler:
    """Cycles one after another: every ``interval_s``, and whenever eviction has used up the last listing.

    ``done`` is called with the outcome of each.
    """

    def __init__(
        self,
        cycle: Cycle,
        site: Site,
        interval_s: float,
        done: Callable[[Summary], object],
        metrics: Metrics | None = None,
    ) -> None:
        self._cycle = cycle
        self._clock = site.clock
        self._pause = site.pause
        self._interval_s = interval_s
        self._done = done
        self._metrics = metrics
        self._outage = OutageLog("round", site.clock)

    def run(self) -> None:
        """Runs until a stop is requested. A cycle that fails is logged once and repeated; bugs are raised."""
        retry_s = RETRY_S_MIN
        try:
            while True:
                try:
                    self._once()
                    retry_s = RETRY_S_MIN
                except KVStoreError as error:
                    # It has harmed nothing: whatever is left open is recovered by the next cycle, ours or another's.
                    self._outage.failed(error)
                    if self._metrics is not None:
                        self._metrics.failed()
                    self._pause(min(retry_s, self._interval_s))
                    retry_s = min(2 * retry_s, RETRY_S_MAX)
        except Stopped:
            return

    def _once(self) -> None:
        """One cycle, and eviction from its listing until the next one is due."""
        until_s = self._clock.monotonic_s() + self._interval_s
        summary = self._cycle.run()
        self._outage.ended()
        self._ended(summary)
        if self._cycle.is_spent and not summary.reaped.count:
            self._pause(min(self._cycle.listing_s, self._interval_s))  # what is held now may be released
            return
        while not self._cycle.is_spent and self._clock.monotonic_s() < until_s:
            self._pause(LOOK_S)
            more = self._cycle.evict()
            if more is not None:
                self._ended(more)

    def _ended(self, summary: Summary) -> None:
        if self._metrics is not None:
            self._metrics.done(summary)
        log.log(logging.WARNING if summary.unfinished else logging.INFO, "%s", summary.to_line())
        self._done(summary)


class Collector:
    """One collector on a site. ``signalled`` waits a number of seconds and returns whether a signal came.

    A root that has not reported its free space for ``hung_s`` hangs.
    """

    def __init__(self, site: Site, config: Config, signalled: Callable[[float], bool]) -> None:
        self._stop = Stop()
        self._site = replace(site, each=Threads(THREADS_COUNT, self._stop).each, pause=self._stop.pause)
        self._config = config
        self._signalled = signalled

    def once(self, listed: Callable[[int], object], *, dry_run: bool = False) -> Summary | None:
        """Does one cycle alongside any other collectors, or finds what it would do; None if a signal came first."""
        pressure = Pressure(self._site, self._config.max_bytes)
        cycle = Cycle(self._site, self._config, pressure, listed=listed)
        pressure.start(self._stop)
        try:
            return self._attend(cycle.dry_run if dry_run else cycle.run, pressure, until_hung=True)
        finally:
            self._stop.ask()
            pressure.join(LISTEN_S)

    def serve(
        self,
        interval_s: float,
        metrics_at: tuple[str, int] | None = None,
        ready: Callable[[str], object] = lambda metrics: None,
        done: Callable[[Summary], object] = lambda summary: None,
    ) -> None:
        """Does cycles until a signal comes; ``done`` is called with the outcome of each.

        ``ready`` is called with the address where metrics are served, as HOST:PORT, if they are.
        """
        site = self._site
        collectors = Collectors(site)
        pressure = Pressure(site, self._config.max_bytes, collectors)
        cycle = Cycle(site, self._config, pressure, collectors)
        with ExitStack() as undo:
            where, metrics = "none", None
            if metrics_at is not None:
                from kvstore_gc.metrics import Metrics, serve  # of a package that the library does without

                metrics = Metrics(pressure, site.clock)
                metrics.follow(interval_s, cycle)
                server = serve(metrics, *metrics_at)
                undo.callback(server.close)
                where = server.address
                ready(where)
            collectors.beat()
            undo.callback(collectors.close)
            pressure.start(self._stop)
            log.info("gc.ready root=%s interval_s=%g metrics=%s", site.root.url, interval_s, where)
            service = CycleScheduler(cycle, site, interval_s, done, metrics)
            self._attend(service.run, pressure, until_hung=False)
            pressure.join(LEAVE_S)
        log.info("gc.stopped")

    def _attend(self, work: Callable[[], T], pressure: Pressure, *, until_hung: bool) -> T | None:
        """The work's result; None if a signal came first. Raises what the work raises, and what ended ``pressure``.

        If the root has not answered for ``hung_s``, it raises Unavailable with ``until_hung``, else it only logs that.
        """
        outage, hung_s = OutageLog("root", self._site.clock), self._site.timings.hung_s
        task = Task(work, "cycle")
        while not task.has_ended(0) and pressure.failure is None and not self._signalled(LISTEN_S):
            if pressure.silent_s <= hung_s:
                outage.ended()
                continue
            hung = f"the root has not answered for {hung_s:g} s; check the mount (kvstore check-root)"
            if until_hung:
                raise Unavailable(hung)
            outage.failed(hung)
        self._stop.ask()
        if not task.has_ended(LEAVE_S):
            # It is in a call to the root that may never return, and closing may not return either. The next cycle
            # finds everything that is half done.
            log.warning("gc.left_hanging the root did not answer; whatever is open is left to the next cycle")
            sys.stdout.flush()
            os._exit(0 if pressure.failure is None else 1)
        if pressure.failure is not None:
            raise pressure.failure  # without its level another collector does better
        try:
            return task.result()
        except Stopped:
            return None
