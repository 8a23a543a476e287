"""A collector put together and running: a single round, or rounds until a signal comes.

The work runs on a thread of its own. The main thread hears signals, and notices a root that hangs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.address import Address
from kvstore.errors import KVStoreError, RootMismatch, Unavailable
from kvstore.host.takeover import check_left
from kvstore.meta.interface import Meta
from kvstore.meta.keys import SessionId
from kvstore.meta.roots import check_bound
from kvstore.root.identity import read_identity
from kvstore.root.open import open_root
from kvstore_gc.capacity import Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.config import Config
from kvstore_gc.rounds import Rounds
from kvstore_gc.service import Service, Trouble
from kvstore_gc.site import Site
from kvstore_gc.summary import Summary
from kvstore_gc.threads import THREADS_COUNT, Pace, Stop, Stopped, Task, Threads, within
from kvstore_gc.watch import Duties, Watch

if TYPE_CHECKING:
    from kvstore_gc.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 30.0
HUNG_S = 60.0
"""A root that has not reported its free space for this long hangs."""
LISTEN_S = 0.2
LEAVE_S = 5.0
"""Time for a round to leave its work when a signal came."""


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


class Collector:
    """One collector on a site. ``signalled`` waits a number of seconds and returns whether a signal came."""

    def __init__(self, site: Site, config: Config, signalled: Callable[[float], bool]) -> None:
        self._stop = Stop()
        self._site = replace(site, each=Threads(THREADS_COUNT, self._stop).each, pause=self._stop.pause)
        self._config = config
        self._signalled = signalled
        self._watermarks = Watermarks(config.max_bytes, config.high, site.clock)
        self._others = Collectors(self._site, config.max_bytes)
        """What others ask for. It never joins them for a single round, which takes no shards from anybody."""

    def once(self, listed: Callable[[int], object], metrics_file: str | None = None) -> Summary | None:
        """Does one round over all shards, beside any other collectors; None if a signal came first.

        The smallest limit of all collectors holds. The outcome is written to ``metrics_file`` as well. A round that
        fails leaves that file as it was.
        """
        summary = self._alone(self._round_of_all(listed).run)
        if summary is not None and metrics_file is not None:
            from kvstore_gc.metrics import write

            measured = self._metrics()
            measured.done(summary)
            write(measured, metrics_file)
        return summary

    def dry_run(self, listed: Callable[[int], object], examples_max: int, explain: Sequence[Address]) -> Summary | None:
        """Finds what a round would do; None if a signal came first."""
        rounds = self._round_of_all(listed)
        return self._alone(lambda: rounds.dry_run(examples_max=examples_max, explain=explain))

    def serve(
        self,
        interval_s: float,
        metrics_at: tuple[str, int] | None = None,
        ready: Callable[[str], object] = lambda metrics: None,
        told: Callable[[Summary], object] = lambda summary: None,
    ) -> None:
        """Does rounds until a signal comes; ``told`` hears of each that ended.

        ``ready`` hears where metrics are served, as HOST:PORT, if they are.
        """
        site, watermarks = self._site, self._watermarks
        duties = Duties.of(site, watermarks, self._config.max_bytes)
        pace = Pace(site.each, is_urgent=lambda: watermarks.is_urgent, pause=site.pause, clock=site.clock)

        def unheard() -> frozenset[SessionId]:
            # Without a limit there is nothing to compare the nodes' writes with.
            return duties.reports.unheard(site.pause) if watermarks.is_known else frozenset()

        rounds = Rounds(
            replace(site, each=pace.each),
            self._config,
            watermarks,
            shards=duties.collectors.shards,
            unheard=unheard,
            ttl_s=lambda: duties.collectors.smallest_ttl_s,
        )
        watch = Watch(site, watermarks, duties)
        measured = None
        if metrics_at is not None:
            measured = self._metrics()
            measured.follow(
                interval_s,
                silent_s=lambda: watch.silent_s,
                fails=lambda: watch.meta_fails,
                shows_full=lambda: duties.sign.is_shown,
                waiting_s=lambda: rounds.waiting_s,
            )
        service = Service(
            rounds.run,
            interval_s=interval_s,
            is_urgent=lambda: watermarks.is_urgent,
            done=lambda summary: _tell(summary, measured, told),
            failed=lambda error: measured.failed() if measured is not None else None,
            pause=site.pause,
            clock=site.clock,
        )
        with ExitStack() as undo:
            where = "none"
            if measured is not None and metrics_at is not None:
                from kvstore_gc.metrics import serve

                where, close = serve(measured, *metrics_at)
                undo.callback(close)
                ready(where)
            duties.collectors.beat()
            undo.callback(duties.collectors.close)
            watch.start(self._stop)
            log.info("gc.ready root=%s interval_s=%g metrics=%s", site.root.url, interval_s, where)
            self._attend(service.run, watch, until_hung=False)
            watch.join(LEAVE_S)
            with suppress(KVStoreError):  # its signs end with its lease, and the next collector counts
                duties.room.close(watermarks)
        log.info("gc.stopped")

    def _metrics(self) -> Metrics:
        from kvstore_gc.metrics import Metrics  # a package that the library does without

        return Metrics(lambda: self._watermarks.level, self._site.clock)

    def _round_of_all(self, listed: Callable[[int], object]) -> Rounds:
        """A single round shares its shards with nobody."""
        others = self._others
        return Rounds(
            self._site,
            self._config,
            self._watermarks,
            shards=range,
            listed=listed,
            ttl_s=lambda: others.smallest_ttl_s,
        )

    def _alone(self, work: Callable[[], Summary]) -> Summary | None:
        self._others.look()
        self._watermarks.limited(self._others.smallest_bytes)
        watch = Watch(self._site, self._watermarks)
        watch.start(self._stop)
        try:
            return self._attend(work, watch, until_hung=True)
        finally:
            self._stop.ask()
            watch.join(LISTEN_S)

    def _attend(self, work: Callable[[], T], watch: Watch, *, until_hung: bool) -> T | None:
        """The work's result; None if a signal came first. Raises what the work raises.

        If the root has not answered for HUNG_S, it raises Unavailable with ``until_hung``, else it only logs that.
        """
        trouble = Trouble("root", self._site.clock)
        task = Task(work, "round")
        while not task.has_ended(0) and not self._signalled(LISTEN_S):
            if watch.silent_s <= HUNG_S:
                trouble.went_well()
                continue
            hung = f"the root has not answered for {HUNG_S:g} s; check the mount (kvstore check-root)"
            if until_hung:
                raise Unavailable(hung)
            trouble.failed(hung)
        self._stop.ask()
        if not task.has_ended(LEAVE_S):
            # It is in a call to the root that may never return, and closing may not return either. The next round
            # finds everything that is half done.
            log.warning("gc.left_hanging the root did not answer; whatever is open is left to the next round")
            sys.stdout.flush()
            os._exit(0)
        try:
            return task.result()
        except Stopped:
            return None


def _tell(summary: Summary, measured: Metrics | None, told: Callable[[Summary], object]) -> None:
    if measured is not None:
        measured.done(summary)
    log.log(logging.WARNING if summary.unfinished else logging.INFO, "%s", summary.to_line())
    told(summary)
