"""A collector put together and running: a single round, or rounds until a signal comes.

The work is done on a thread of its own: the main thread hears signals, and notices a root that hangs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvstore.address import Address
from kvstore.errors import RootMismatch, Unavailable
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.roots import bound_root
from kvstore.root.identity import RootIdentity, read_identity
from kvstore.root.interface import Root
from kvstore.root.open import open_root
from kvstore.sources import RandomIds, SystemClock
from kvstore_gc.capacity import Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.config import Config
from kvstore_gc.metrics import Metrics, serve, write
from kvstore_gc.pace import Pace
from kvstore_gc.reports import Reports
from kvstore_gc.rounds import Rounds
from kvstore_gc.safety import Timings
from kvstore_gc.service import Service
from kvstore_gc.signs import FullSign, RoomSign
from kvstore_gc.summary import Summary
from kvstore_gc.threads import THREADS_COUNT, Each, Stop, Stopped, Threads, within
from kvstore_gc.troubles import Trouble
from kvstore_gc.watch import Duties, Watch

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 30.0
HUNG_S = 60.0
"""A root that has not told its free space for so long hangs."""
LISTEN_S = 0.2
LEAVE_S = 5.0
"""How long a round may take to leave what it is doing when a signal came."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A root and its metadata store."""

    root: Root
    identity: RootIdentity
    meta: Meta


@contextmanager
def opened(url: str, options: Mapping[str, Any], meta: Meta) -> Iterator[Opened]:
    """The root at ``url``, which must be one, and which ``meta`` must not know as another. Closes both afterwards.

    Raises RootMismatch, Unavailable, and what opening a root raises.
    """
    with ExitStack() as undo:
        undo.callback(meta.close)
        root = within(OPEN_S, f"the root {url}", lambda: open_root(url, options, create=False))
        undo.callback(root.close)
        identity = within(OPEN_S, f"the root {url}", lambda: read_identity(root))
        if identity is None:
            raise RootMismatch(f"{root.url} is not a kvstore root: it has no FORMAT file. Is the file system mounted?")
        known = bound_root(meta, root.url)
        if known not in (None, identity.root):
            raise RootMismatch(
                f"{root.url} is root {identity.root.hex()}, but this etcd knows another root there: is the right file "
                "system mounted, and is it this cluster's etcd?"
            )
        yield Opened(root, identity, meta)


class Collector:
    """One collector of an opened root. ``signalled`` waits so many seconds and says whether a signal came."""

    def __init__(self, on: Opened, config: Config, signalled: Callable[[float], bool]) -> None:
        self._on = on
        self._config = config
        self._signalled = signalled
        self._stop = Stop()
        self._clock = SystemClock()
        self._ids = RandomIds()
        self._watermarks = Watermarks(config.max_bytes, config.high, self._clock)
        self._each = Threads(THREADS_COUNT, self._stop).each

    def once(self, listed: Callable[[int], object], metrics_file: str | None = None) -> Summary | None:
        """One round over all shards, beside whatever other collectors do; None where a signal came first.

        Where one that stays has a smaller limit, that holds.

        What it did is written to ``metrics_file`` as well. A round that fails leaves that file as it was.
        """
        summary = self._alone(self._rounds(_all, self._each, listed).run)
        if summary is not None and metrics_file is not None:
            measured = self._metrics()
            measured.done(summary)
            write(measured, metrics_file)
        return summary

    def dry_run(self, listed: Callable[[int], object], examples_max: int, explain: Sequence[Address]) -> Summary | None:
        """What a round would do; None where a signal came first."""
        rounds = self._rounds(_all, self._each, listed)
        return self._alone(lambda: rounds.dry_run(examples_max=examples_max, explain=explain))

    def serve(self, interval_s: float, metrics_at: tuple[str, int] | None, told: Callable[[Summary], object]) -> None:
        """Rounds until a signal comes; ``told`` hears of each that ended."""
        on, clock = self._on, self._clock
        keys = Keys(on.identity.root)
        collectors = Collectors(on.meta, keys, clock=clock, ids=self._ids, max_bytes=self._config.max_bytes)
        sign = FullSign(on.meta, keys, collectors, clock)
        reports = Reports(on.meta, keys, collectors, self._watermarks, clock)
        room = RoomSign(on.meta, keys, collectors, reports, clock)
        pace = Pace(self._each, is_urgent=lambda: self._watermarks.is_urgent, pause=self._stop.pause, clock=clock)
        rounds = self._rounds(collectors.shards, pace.each, unheard=partial(self._unheard, reports))
        watch = Watch(on.root, self._watermarks, clock, Duties(collectors, reports, sign, room))
        measured = self._metrics()
        measured.follow(
            interval_s,
            silent_s=lambda: watch.silent_s,
            fails=lambda: watch.meta_fails,
            shows_full=lambda: sign.is_shown,
            waiting_s=lambda: rounds.waiting_s,
        )

        def done(summary: Summary) -> None:
            measured.done(summary)
            log.log(logging.WARNING if summary.unfinished else logging.INFO, "%s", summary.to_line())
            told(summary)

        service = Service(
            rounds.run,
            interval_s=interval_s,
            is_urgent=lambda: self._watermarks.is_urgent,
            done=done,
            failed=lambda error: measured.failed(),
            pause=self._stop.pause,
            clock=clock,
        )
        with ExitStack() as undo:
            where = "none"
            if metrics_at is not None:
                port, close = serve(measured, *metrics_at)
                undo.callback(close)
                where = f"{metrics_at[0]}:{port}"
            collectors.beat()
            undo.callback(collectors.close)
            watch.start(self._stop)
            log.info("gc.ready root=%s interval_s=%g metrics=%s", on.root.url, interval_s, where)
            self._attend(service.run, watch, until_hung=False)
            watch.join(LEAVE_S)
        log.info("gc.stopped")

    def _metrics(self) -> Metrics:
        return Metrics(lambda: self._watermarks.level, self._clock)

    def _alone(self, work: Callable[[], Summary]) -> Summary | None:
        keys = Keys(self._on.identity.root)
        others = Collectors(
            self._on.meta, keys, clock=self._clock, ids=self._ids, max_bytes=self._config.max_bytes
        )  # does not join: it takes no shards
        others.look()
        self._watermarks.limited(others.smallest_bytes)
        watch = Watch(self._on.root, self._watermarks, self._clock)
        watch.start(self._stop)
        try:
            return self._attend(work, watch, until_hung=True)
        finally:
            self._stop.ask()
            watch.join(LISTEN_S)

    def _rounds(
        self,
        shards: Callable[[int], Sequence[int]],
        each: Each,
        listed: Callable[[int], object] = lambda shard: None,
        unheard: Callable[[], frozenset[SessionId]] | None = None,
    ) -> Rounds:
        return Rounds(
            self._on.root,
            self._on.identity,
            self._on.meta,
            self._config,
            self._watermarks,
            shards=shards,
            each=each,
            pause=self._stop.pause,
            clock=self._clock,
            ids=self._ids,
            timings=Timings(),
            listed=listed,
            unheard=unheard,
        )

    def _unheard(self, reports: Reports) -> frozenset[SessionId]:
        """Nodes are asked only where what they wrote is compared with something."""
        return reports.unheard(self._stop.pause) if self._watermarks.is_known else frozenset()

    def _attend(self, work: Callable[[], T], watch: Watch, *, until_hung: bool) -> T | None:
        """The work's result; None where a signal came first. Raises what the work raises.

        With ``until_hung`` raises Unavailable when the root has not answered for HUNG_S; without it is only said.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def only() -> None:
            try:
                results.append(work())
            except Stopped:
                pass
            except BaseException as raised:  # noqa: BLE001 - carried to the main thread, which raises it
                errors.append(raised)

        trouble = Trouble("root", self._clock)
        thread = threading.Thread(target=only, name="kvstore-gc round", daemon=True)
        thread.start()
        while thread.is_alive() and not self._signalled(LISTEN_S):
            if watch.silent_s <= HUNG_S:
                trouble.went_well()
                continue
            hung = f"the root has not answered for {HUNG_S:g} s; check the mount (kvstore check-root)"
            if until_hung:
                raise Unavailable(hung)
            trouble.failed(hung)
        self._stop.ask()
        thread.join(LEAVE_S)
        if thread.is_alive():
            # It is in a call to the root that may never return, and so may closing be. Whatever is half done is found
            # by the next round.
            log.warning("gc.left_hanging the root did not answer; what is open is left to the next round")
            sys.stdout.flush()
            os._exit(0)
        if errors:
            raise errors[0]
        return results[0] if results else None


def _all(count: int) -> range:
    """All shards: a single round does not share."""
    return range(count)
