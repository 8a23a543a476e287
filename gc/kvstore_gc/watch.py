"""What a collector does all the time, beside its rounds: keep its place, follow reports and free space, show signs.

On a thread of its own, because a round takes minutes and either of them may hang.  Where the root hangs, this hangs as
well: then the collector's lease ends, others take its shards, and its sign is gone.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.root.interface import Root
from kvstore.sources import Clock
from kvstore_gc.capacity import Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.reports import Reports
from kvstore_gc.signs import FullSign, RoomSign
from kvstore_gc.threads import Stop, Stopped
from kvstore_gc.troubles import Trouble

TICK_S = 0.25
"""Between two looks at the free space, and between two ticks where nobody reports; a report begins one at once."""
REST_S = 0.02
"""Between two ticks at least."""


@dataclass(frozen=True, slots=True)
class Duties:
    """What a collector that stays does with the metadata store at each tick."""

    collectors: Collectors
    reports: Reports
    sign: FullSign
    room: RoomSign


class Watch:
    """``start`` ticks until the end is asked for. ``duties`` are None for a single round."""

    def __init__(
        self,
        root: Root,
        watermarks: Watermarks,
        clock: Clock,
        duties: Duties | None = None,
    ) -> None:
        self._root = root
        self._watermarks = watermarks
        self._clock = clock
        self._duties = duties
        self._ticked_s = clock.monotonic_s()
        self._looked_s = -math.inf
        self._meta_trouble = Trouble("place", clock)
        self._root_trouble = Trouble("space", clock)
        self._thread: threading.Thread | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the last tick ended: much, and the root or the metadata store hangs."""
        return self._clock.monotonic_s() - self._ticked_s

    @property
    def meta_fails(self) -> bool:
        """Whether the metadata store did not answer the last time."""
        return self._meta_trouble.lasts

    def tick(self) -> None:
        """Once. What fails is said once, and tried again at the next tick."""
        if self._clock.monotonic_s() - self._looked_s >= TICK_S:
            self._look()
        try:
            if self._duties is not None:
                self._do(self._duties)
            self._meta_trouble.went_well()
        except KVStoreError as error:
            self._meta_trouble.failed(error)
        self._ticked_s = self._clock.monotonic_s()

    def start(self, stop: Stop) -> None:
        """Ticks from now on, in a daemon thread."""
        self._thread = threading.Thread(target=self._run, args=(stop,), name="kvstore-gc watch", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread after the end was asked for; one that hangs ends with the program."""
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
        """Until somebody reports, or not so long."""
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

    def _do(self, duties: Duties) -> None:
        duties.collectors.beat()
        self._watermarks.limited(duties.collectors.smallest_bytes)
        duties.reports.follow()
        duties.reports.tell()
        # The word before the sign: it stops nodes as well, and lets others go on.
        duties.room.follow(self._watermarks)
        duties.sign.follow(self._watermarks)
