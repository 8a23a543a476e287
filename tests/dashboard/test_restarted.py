"""A worker that was killed and started again: the page shows the pid of the newest start, or none until it is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kvstore.client.store import Store
from kvstore.core.metrics import STARTED
from kvstore.dashboard.poller import SourceValue
from kvstore.dashboard.snapshots import EtcdSource, WhichRoot
from kvstore.dashboard.views import Board, Documents
from kvstore.dashboard.workers import WorkersSource
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.session import SessionRecord
from kvstore.meta.workers import WorkerRecord
from tests.kit.fake_meta import FakeClock

KEYS = Keys(bytes(16))


class Page:
    """The sources of one dashboard, each read when the test says so."""

    def __init__(self) -> None:
        self.clock, self.meta = FakeClock(), MemoryMetadata()
        self.answers: dict[str, Any] = {}
        which = WhichRoot(None)
        which.learn(KEYS.root_id)
        self._etcd = EtcdSource(lambda: self.meta, which, self.clock)
        self._workers = WorkersSource(lambda: cast(Store, SimpleNamespace(stats_each=lambda: self.answers)), self.clock)
        self._readings: dict[str, SourceValue[Any]] = {}

    def start(self, session: bytes, pid: int) -> None:
        """A worker begins: it registers, and answers."""
        id = SessionId(session * 16)
        self.meta.put(KEYS.session(id), SessionRecord(0, 0).to_json())
        self.meta.put(KEYS.worker(id), WorkerRecord("a:1", host="h", pid=pid).to_json())
        self.answers = {"a:1": {STARTED: float(pid)}}

    def ask_workers(self) -> None:
        self.clock.advance(2.0)
        self._readings["workers"] = SourceValue(self._workers.seen(), 0.0, None)

    def read_etcd(self) -> None:
        self.clock.advance(2.0)
        self._readings["etcd"] = SourceValue(self._etcd.cluster(), 0.0, None)

    def row(self) -> tuple[int | None, str | None, int]:
        """The pid, the session and the restarts that the page shows."""
        feeds = {name: SimpleNamespace(look=lambda each=each: each) for name, each in self._readings.items()}
        board = cast(Board, SimpleNamespace(feeds=feeds, clock=self.clock, root_url="memory:"))
        (row,) = Documents(board).workers()["workers"]
        assert row["awaited"] is (row["pid"] is None)
        return row["pid"], row["session"] and row["session"][:2], row["restarts"]


def test_the_pid_of_a_killed_worker_is_not_shown_beside_its_restart() -> None:
    for first, second in ((b"\x11", b"\x22"), (b"\x22", b"\x11")):  # either may come last in a listing
        page = Page()
        page.start(first, pid=1)
        page.read_etcd()
        page.ask_workers()
        assert page.row() == (1, first.hex(), 0)
        page.start(second, pid=2)  # the lease of the killed one has not ended
        page.ask_workers()
        assert page.row() == (None, None, 1), "etcd was not read since"
        page.read_etcd()
        assert page.row() == (2, second.hex(), 1)
        page.ask_workers()
        assert page.row() == (2, second.hex(), 1)


def test_the_pid_of_a_restart_that_etcd_told_of_first_is_shown() -> None:
    page = Page()
    page.start(b"\x22", pid=1)
    page.read_etcd()
    page.ask_workers()
    page.start(b"\x11", pid=2)
    page.read_etcd()
    assert page.row() == (2, "11", 0)
    page.ask_workers()
    assert page.row() == (2, "11", 1)
