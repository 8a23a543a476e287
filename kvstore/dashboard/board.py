"""The board: all sources of the dashboard, each with its feed, started and ended together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.dashboard.cluster import EtcdSource, WhichRoot
from kvstore.dashboard.collecting import PlanSource
from kvstore.dashboard.exploring import explore
from kvstore.dashboard.feed import Feed
from kvstore.dashboard.forest import Forest
from kvstore.dashboard.rooted import RootSource
from kvstore.dashboard.workers import WorkersSource
from kvstore.meta.interface import Meta
from kvstore.root.interface import Root
from kvstore.sources import Clock, SystemClock

if TYPE_CHECKING:
    from kvstore.client.store import Store


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between two readings of each source; the last four are read only while somebody looks."""

    workers_s: float = 2.0
    cluster_s: float = 5.0
    root_s: float = 10.0
    quarantine_s: float = 30.0
    pins_s: float = 10.0
    operations_s: float = 2.0
    plan_s: float = 60.0
    forest_s: float = 60.0
    late_s: float = 6.0
    """A source that takes longer than this is shown as not answering."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Opens the sources of a board; each function is called by a thread that may wait."""

    root_url: str
    """URL of the root, as in ``Root.url``."""
    open_root: Callable[[], Root]
    open_meta: Callable[[], Meta]
    connect: Callable[[str], Store]
    """Opens a store through the workers of the root with this id, in hex."""
    collector: Sequence[str] | None
    """The command line of the collector, with all that it needs to reach the same root; None if there is none."""


@dataclass(slots=True)
class Board:
    """All feeds of the dashboard. ``open_board`` makes it and starts nothing; ``start`` it, ``close`` it."""

    root_url: str
    clock: Clock
    workers: WorkersSource
    etcd: EtcdSource
    roots: tuple[RootSource, ...]
    plans: PlanSource
    feeds: dict[str, Feed[Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Starts all feeds."""
        for feed in self.feeds.values():
            feed.start()

    def close(self) -> None:
        """Ends all feeds and their sources. A source that hangs is left to the end of the process. Idempotent."""
        self.plans.close()
        for feed in self.feeds.values():
            feed.close()
        self.workers.close()
        self.etcd.close()
        for root in self.roots:
            root.close()


def open_board(reach: Reach, pace: Pace | None = None, clock: Clock | None = None) -> Board:
    """Makes a board of one cluster; connects to nothing yet."""
    pace, clock = pace or Pace(), clock or SystemClock()
    which = WhichRoot(reach.root_url)
    etcd = EtcdSource(reach.open_meta, which, clock)
    # One source per feed: if the root hangs, the thread that asks for its room must not delay the other feeds.
    room, set_aside, explored = (RootSource(reach.open_root, which.learn) for _ in range(3))
    workers = WorkersSource(lambda: reach.connect(etcd.root_id().hex()), clock)
    plans = PlanSource(reach.collector)
    board = Board(reach.root_url, clock, workers, etcd, (room, set_aside, explored), plans)

    for name, read, interval_s, late_s, on_demand in (
        ("workers", workers.seen, pace.workers_s, pace.late_s, False),
        ("etcd", etcd.cluster, pace.cluster_s, pace.late_s, False),
        ("root", room.seen, pace.root_s, pace.late_s, False),
        ("quarantine", set_aside.quarantine, pace.quarantine_s, pace.late_s, False),
        ("pins", etcd.pins, pace.pins_s, pace.late_s, True),
        ("operations", workers.operations, pace.operations_s, pace.late_s, True),
        ("plan", plans.plan, pace.plan_s, LONG_S, True),
        ("forest", partial(_forest, explored), pace.forest_s, LONG_S, True),
    ):
        board.feeds[name] = Feed(name, read, interval_s, clock, late_s=late_s, on_demand=on_demand)
    return board


LONG_S = 120.0
"""Limit of a plan or a census, which take long over a large root; one that takes longer is reported as late."""


def _forest(source: RootSource) -> Forest:
    return explore(*source.opened())
