"""Storing on a worker: full blocks are copied out within the step that filled them, and published in the background.

The copy keeps the rest simple: the engine may reuse the blocks at once (a finished, preempted or aborted request), and
a store that hangs costs only our own memory, which is bounded.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

from kvstore.background import Tasks
from kvstore.connectors.vllm.counts import EngineCount, EngineCounts
from kvstore.connectors.vllm.gpu_copy import PART_BYTES, Copy, Pages
from kvstore.connectors.vllm.link import Link
from kvstore.connectors.vllm.messages import Run
from kvstore.errors import KVStoreError, Unavailable

log = logging.getLogger(__name__)

AT_ONCE_MAX = 2_048
"""Blocks copied out and put at once: their descents are below the limit of one put (kvstore/wire/limits.py)."""


class Storer:
    """One thread that publishes. ``pages`` has one per cluster, ``link`` a cache per part of a block."""

    def __init__(
        self,
        link: Link,
        pages: Sequence[Pages],
        counts: EngineCounts,
        *,
        bytes_max: int,
        pause_s: float,
        tells: bool = False,
    ) -> None:
        self._link = link
        self._pages = pages
        self._counts = counts
        self._bytes_max = bytes_max
        self._pause_s = pause_s
        self._paused_until_s = 0.0
        self._lock = threading.Lock()
        self._bytes = 0
        self._on_the_way: set[bytes] = set()
        self._tells = tells
        self._settled: dict[bytes, bool] = {}
        """Whether blocks are in the store, since somebody last asked; only if it ``tells``."""
        self._idle = threading.Event()
        self._idle.set()
        # store_bytes_max bounds what waits, so the queue itself needs no bound of its own.
        self._thread = Tasks("kvstore-vllm-store", 1, sys.maxsize)

    def store(self, run: Run) -> None:
        """Copies the blocks of ``run`` out, in parts, and publishes them in the background.

        Blocks already being stored are skipped; those without room, or without a store, are dropped.
        """
        at_once = max(1, min(PART_BYTES // self._pages[run.cluster].block_bytes, AT_ONCE_MAX))
        for start in range(0, len(run.keys), at_once):
            part = self._admit(run.picked(range(start, min(start + at_once, len(run.keys)))))
            if part is not None:
                try:
                    copy = self._pages[part.cluster].copy_out(part.blocks)
                    is_begun = self._thread.submit(partial(self._serve, part, copy))
                except Exception as error:  # noqa: BLE001 - the device's too: the engine's step goes on all the same
                    log.warning("kvstore: blocks are not stored: %s", error)
                    is_begun = False
                if not is_begun:
                    self._done(part, [False] * len(part.keys))

    def settled(self, within_s: float) -> dict[bytes, bool]:
        """Returns which blocks came into the store since the last call, and which did not.

        Waits for those on their way, at most ``within_s``.
        """
        if within_s:
            self._idle.wait(within_s)
        with self._lock:
            settled, self._settled = self._settled, {}
        return settled

    def _admit(self, run: Run) -> Run | None:
        """Returns the blocks of ``run`` to copy out, and counts their memory from now on; None if there are none."""
        is_down = self._link.caches() is None or time.monotonic() < self._paused_until_s
        with self._lock:
            run = run.picked([at for at, key in enumerate(run.keys) if key not in self._on_the_way])
            keys = run.keys
            size = len(keys) * self._pages[run.cluster].block_bytes
            is_shed = is_down or self._bytes + size > self._bytes_max
            if is_shed:
                self._settle(keys, [False] * len(keys))
            elif keys:
                self._bytes += size
                self._on_the_way.update(keys)
                self._idle.clear()
        if is_shed:
            self._counts.add(EngineCount.STORE_SHED_BLOCKS, len(keys))
        return None if is_shed or not keys else run

    def close(self, timeout_s: float) -> None:
        """Publishes blocks in progress, for at most ``timeout_s``."""
        self._idle.wait(timeout_s)
        self._thread.close(0.0)

    def _serve(self, run: Run, copy: Copy) -> None:
        flags: list[bool] = []
        try:
            flags = self._publish(run, copy)
        except Exception:
            log.exception("kvstore: blocks could not be stored")
        self._done(run, flags or [False] * len(run.keys))

    def _settle(self, keys: Sequence[bytes], flags: Sequence[bool]) -> None:
        if self._tells:
            self._settled.update(zip(keys, flags, strict=True))

    def _done(self, run: Run, flags: Sequence[bool]) -> None:
        size, stored = self._pages[run.cluster].block_bytes, sum(flags)
        self._counts.add(EngineCount.STORED_BLOCKS, stored)
        self._counts.add(EngineCount.STORED_BYTES, stored * size)
        self._counts.add(EngineCount.STORE_FAILED_BLOCKS, len(run.keys) - stored)
        with self._lock:
            self._bytes -= len(run.keys) * size
            self._on_the_way.difference_update(run.keys)
            self._settle(run.keys, flags)
            if not self._on_the_way:
                self._idle.set()

    def _publish(self, run: Run, copy: Copy) -> list[bool]:
        """Returns whether each block is in the store; nothing if none is."""
        caches = self._link.caches()
        if caches is None or time.monotonic() < self._paused_until_s:
            return []
        if run.seal is not None and not run.seal.holds():
            return []
        try:
            hints = run.hints
            ttl = math.inf if hints.ttl_s is None else hints.ttl_s
            parts = self._pages[run.cluster].parts(copy.rows())
            stored = [
                cache.put(run.keys, part, first=run.first, descents=run.descents, priority=hints.priority, ttl=ttl)
                for cache, part in zip(caches, parts, strict=True)
            ]
            return [all(each) for each in zip(*stored, strict=True)]
        except Unavailable:
            # The next ones would wait as long: drop them until the store may be well again.
            self._paused_until_s = time.monotonic() + self._pause_s
        except KVStoreError as error:
            log.warning("kvstore: the store refuses blocks: %s", error)
        return []
