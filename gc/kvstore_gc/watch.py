"""The thread beside the rounds: keeps the collector's place, follows reports and free space, shows signs.

A thread of its own, because a round takes minutes and either of them may hang. If the root hangs, this thread hangs as
well: then the collector's lease ends, others take its shards, and its sign is gone.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore_gc.capacity import Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.reports import Reports
from kvstore_gc.service import Trouble
from kvstore_gc.signs import FullSign, RoomSign
from kvstore_gc.site import Site
from kvstore_gc.threads import Stop, Stopped

TICK_S = 0.25
"""Time between two looks at the free space, and between two ticks without a report; a report begins one at once."""
REST_S = 0.02
"""Least time between two ticks."""


@dataclass(frozen=True, slots=True)
class Duties:
    """The work of a collector that stays with the metadata store, at each tick."""

    collectors: Collectors
    reports: Reports
    sign: FullSign
    room: RoomSign

    @classmethod
    def of(cls, site: Site, watermarks: Watermarks, max_bytes: int | None = None) -> Duties:
        """The duties of a new collector with a limit of ``max_bytes``."""
        # On a host nodes write on without metadata, and report none of it (rule S8): it is counted.
        collectors = Collectors(site, max_bytes)
        reports = Reports(site, collectors, watermarks)
        return cls(collectors, reports, FullSign(site, collectors), RoomSign(site, collectors, reports))

    def do(self, watermarks: Watermarks) -> None:
        """Does them once. Raises the metadata store's errors."""
        self.collectors.beat()
        watermarks.limited(self.collectors.smallest_bytes)
        self.reports.follow()
        self.reports.tell()
        # The room before the sign: it also stops nodes, and allows others to go on.
        self.room.follow(watermarks)
        self.sign.follow(watermarks)


class Watch:
    """``start`` ticks until a stop is requested. ``duties`` are None for a single round."""

    def __init__(self, site: Site, watermarks: Watermarks, duties: Duties | None = None) -> None:
        self._root = site.root
        self._watermarks = watermarks
        self._clock = clock = site.clock
        self._duties = duties
        self._ticked_s = clock.monotonic_s()
        self._looked_s = -math.inf
        self._meta_trouble = Trouble("place", clock)
        self._root_trouble = Trouble("space", clock)
        self._thread: threading.Thread | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the last tick ended. If it is long, the root or the metadata store hangs."""
        return self._clock.monotonic_s() - self._ticked_s

    @property
    def meta_fails(self) -> bool:
        """True if the metadata store did not answer the last time."""
        return self._meta_trouble.lasts

    def tick(self) -> None:
        """One tick. A failure is logged once; the next tick tries again."""
        if self._clock.monotonic_s() - self._looked_s >= TICK_S:
            self._look()
        try:
            if self._duties is not None:
                self._duties.do(self._watermarks)
            self._meta_trouble.went_well()
        except KVStoreError as error:
            self._meta_trouble.failed(error)
        self._ticked_s = self._clock.monotonic_s()

    def start(self, stop: Stop) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, args=(stop,), name="kvstore-gc watch", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread after a stop was requested; if it hangs, it ends with the program."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, stop: Stop) -> None:
        try:
            while True:
                self.tick()
                stop.pause(REST_S)
                self._wait(stop, TICK_S - REST_S)
        except Stopped:
            return
        finally:
            if self._duties is not None:
                self._duties.reports.close()

    def _wait(self, stop: Stop, wait_s: float) -> None:
        """Waits until somebody reports, or for ``wait_s``."""
        if self._duties is None or self._meta_trouble.lasts:
            stop.pause(wait_s)
            return
        try:
            self._duties.reports.follow(wait_s)
        except KVStoreError as error:
            self._meta_trouble.failed(error)

    def _look(self) -> None:
        try:
            self._watermarks.followed(self._root.space())
            self._root_trouble.went_well()
        except KVStoreError as error:
            self._root_trouble.failed(error)
        self._looked_s = self._clock.monotonic_s()
