"""A collector put together and running: a single cycle, or cycles until a signal comes.

The work runs on a thread of its own. The main thread waits for signals, and notices a root that hangs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.address import Address
from kvstore.errors import KVStoreError, RootMismatch, Unavailable
from kvstore.host.tables import check_left
from kvstore.meta.cluster import check_bound
from kvstore.meta.store import Meta
from kvstore.root.identity import read_identity
from kvstore.root.open import open_root
from kvstore_gc.capacity import Accounts, Publisher
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.membership import Collectors
from kvstore_gc.site import Site
from kvstore_gc.summary import Summary
from kvstore_gc.threads import THREADS_COUNT, OutageLog, Pace, Stop, Stopped, Task, Threads, within

if TYPE_CHECKING:
    from kvstore_gc.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 30.0
HUNG_S = 60.0
"""A root that has not reported its free space for this long hangs."""
LISTEN_S = 0.2
LEAVE_S = 5.0
"""Time for a cycle to leave its work when a signal came."""
LOOK_S = 0.05
"""Time between two looks at the level while nothing is evicted."""
RETRY_S_MIN = 1.0
RETRY_S_MAX = 30.0
"""Pause after a cycle that failed, doubled each time."""


@contextmanager
def opened(url: str, options: Mapping[str, Any], etcd: Meta) -> Iterator[Site]:
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


class Service:
    """Cycles one after another: every ``interval_s``, and whenever eviction has used up the last listing.

    ``done`` is called with the outcome of each, ``failed`` with each failure.
    """

    def __init__(
        self,
        cycle: Cycle,
        site: Site,
        interval_s: float,
        done: Callable[[Summary], object],
        failed: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        self._cycle = cycle
        self._clock = site.clock
        self._pause = site.pause
        self._interval_s = interval_s
        self._done = done
        self._failed = failed
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
                    self._failed(error)
                    self._pause(min(retry_s, self._interval_s))
                    retry_s = min(2 * retry_s, RETRY_S_MAX)
        except Stopped:
            return

    def _once(self) -> None:
        """One cycle, and eviction from its listing until the next one is due."""
        until_s = self._clock.monotonic_s() + self._interval_s
        summary = self._cycle.run()
        self._outage.ended()
        self._done(summary)
        if self._cycle.is_spent and not summary.reaped.count:
            self._pause(min(self._cycle.listing_s, self._interval_s))  # what is held now may be released
            return
        while not self._cycle.is_spent and self._clock.monotonic_s() < until_s:
            self._pause(LOOK_S)
            more = self._cycle.evict()
            if more is not None:
                self._done(more)


class Collector:
    """One collector on a site. ``signalled`` waits a number of seconds and returns whether a signal came."""

    def __init__(self, site: Site, config: Config, signalled: Callable[[float], bool]) -> None:
        self._stop = Stop()
        self._site = replace(site, each=Threads(THREADS_COUNT, self._stop).each, pause=self._stop.pause)
        self._config = config
        self._signalled = signalled
        self._accounts = Accounts(config.max_bytes, site.clock)

    def once(self, listed: Callable[[int], object], metrics_file: str | None = None) -> Summary | None:
        """Does one cycle over all shards, beside any other collectors; None if a signal came first.

        The smallest limit of all collectors holds. The outcome is written to ``metrics_file`` as well. A cycle that
        fails leaves that file as it was.
        """
        summary = self._alone(self._cycle_of_all(listed).run)
        if summary is not None and metrics_file is not None:
            from kvstore_gc.metrics import write

            measured = self._metrics()
            measured.done(summary)
            write(measured, metrics_file)
        return summary

    def dry_run(self, listed: Callable[[int], object], examples_max: int, explain: Sequence[Address]) -> Summary | None:
        """Finds what a cycle would do; None if a signal came first."""
        cycle = self._cycle_of_all(listed)
        return self._alone(lambda: cycle.dry_run(examples_max=examples_max, explain=explain))

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
        site, accounts = self._site, self._accounts
        collectors = Collectors(site, self._config.max_bytes)
        publisher = Publisher(site, accounts, collectors)
        pace = Pace(site.each, is_urgent=lambda: accounts.excess_bytes > 0, pause=site.pause, clock=site.clock)
        paced = replace(site, each=pace.each)
        cycle = Cycle(paced, self._config, accounts, shards=collectors.shards, publisher=publisher)
        with ExitStack() as undo:
            where, measured = "none", None
            if metrics_at is not None:
                from kvstore_gc.metrics import serve

                measured = self._metrics()
                measured.follow(interval_s, publisher, accounts, cycle)
                where, close = serve(measured, *metrics_at)
                undo.callback(close)
                ready(where)

            def ended(summary: Summary) -> None:
                if measured is not None:
                    measured.done(summary)
                log.log(logging.WARNING if summary.unfinished else logging.INFO, "%s", summary.to_line())
                done(summary)

            def failed(error: Exception) -> None:
                if measured is not None:
                    measured.failed()

            collectors.beat()
            undo.callback(collectors.close)
            publisher.start(self._stop)
            log.info("gc.ready root=%s interval_s=%g metrics=%s", site.root.url, interval_s, where)
            self._attend(Service(cycle, site, interval_s, ended, failed).run, publisher, until_hung=False)
            publisher.join(LEAVE_S)
        log.info("gc.stopped")

    def _metrics(self) -> Metrics:
        from kvstore_gc.metrics import Metrics  # a package that the library does without

        return Metrics(lambda: self._accounts.level, self._site.clock)

    def _cycle_of_all(self, listed: Callable[[int], object]) -> Cycle:
        """A single cycle shares its shards with nobody."""
        return Cycle(self._site, self._config, self._accounts, shards=range, listed=listed)

    def _alone(self, work: Callable[[], Summary]) -> Summary | None:
        others = Collectors(self._site, self._config.max_bytes)  # it takes no shards from them, so it does not join
        others.look()
        self._accounts.limited(others.smallest_bytes)
        publisher = Publisher(self._site, self._accounts)
        publisher.start(self._stop)
        try:
            return self._attend(work, publisher, until_hung=True)
        finally:
            self._stop.ask()
            publisher.join(LISTEN_S)

    def _attend(self, work: Callable[[], T], publisher: Publisher, *, until_hung: bool) -> T | None:
        """The work's result; None if a signal came first. Raises what the work raises.

        If the root has not answered for HUNG_S, it raises Unavailable with ``until_hung``, else it only logs that.
        """
        outage = OutageLog("root", self._site.clock)
        task = Task(work, "cycle")
        while not task.has_ended(0) and not self._signalled(LISTEN_S):
            if publisher.silent_s <= HUNG_S:
                outage.ended()
                continue
            hung = f"the root has not answered for {HUNG_S:g} s; check the mount (kvstore check-root)"
            if until_hung:
                raise Unavailable(hung)
            outage.failed(hung)
        self._stop.ask()
        if not task.has_ended(LEAVE_S):
            # It is in a call to the root that may never return, and closing may not return either. The next cycle
            # finds everything that is half done.
            log.warning("gc.left_hanging the root did not answer; whatever is open is left to the next cycle")
            sys.stdout.flush()
            os._exit(0)
        try:
            return task.result()
        except Stopped:
            return None
