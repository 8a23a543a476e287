"""What a collector does every second, beside its rounds: keep its place, follow the free space, show the sign.

On a thread of its own, because a round takes minutes and either of them may hang.  Where the root hangs, this hangs as
well: then the collector's lease ends, others take its shards, and its sign is gone.
"""

from __future__ import annotations

import threading

from kvstore.errors import KVStoreError
from kvstore.root.interface import Root
from kvstore.sources import Clock
from kvstore_gc.capacity import FullSign, Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.threads import Stop, Stopped
from kvstore_gc.troubles import Trouble

TICK_S = 0.25


class Watch:
    """``start`` ticks until the end is asked for. ``collectors`` and ``sign`` are None for a single round."""

    def __init__(
        self,
        root: Root,
        watermarks: Watermarks,
        clock: Clock,
        collectors: Collectors | None = None,
        sign: FullSign | None = None,
    ) -> None:
        self._root = root
        self._watermarks = watermarks
        self._clock = clock
        self._collectors = collectors
        self._sign = sign
        self._ticked_s = clock.monotonic_s()
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
        try:
            self._watermarks.followed(self._root.space())
            self._root_trouble.went_well()
        except KVStoreError as error:
            self._root_trouble.failed(error)
        try:
            if self._collectors is not None:
                self._collectors.beat()
            if self._sign is not None:
                self._sign.follow(self._watermarks)
            self._meta_trouble.went_well()
        except KVStoreError as error:
            self._meta_trouble.failed(error)
        self._ticked_s = self._clock.monotonic_s()

    def start(self, stop: Stop) -> None:
        """Ticks every second from now on, in a daemon thread."""
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
                stop.pause(TICK_S)
        except Stopped:
            return
