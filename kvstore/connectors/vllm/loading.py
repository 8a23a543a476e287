"""Loading on a worker: blocks are read from the store, verified, and copied into the engine's KV memory.

A block lies in one piece in the store, and in one for each layer in the engine: so it comes into memory of ours first.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from kvstore.background import Tasks
from kvstore.connectors.vllm.counts import EngineCount, EngineCounts
from kvstore.connectors.vllm.gpu_copy import Pages
from kvstore.connectors.vllm.link import Link
from kvstore.connectors.vllm.messages import Load, Run
from kvstore.errors import KVStoreError
from kvstore.wire.limits import BLOCKS_MAX

log = logging.getLogger(__name__)

QUEUE_MAX = 65_536
"""Loads that may wait for a thread; each belongs to a request that the engine has."""


@dataclass(slots=True)
class Loading:
    """One load in progress; complete once ``done`` is set."""

    load: Load
    after: Any
    started_s: float
    keep: bool
    """True if the blocks stay on the host, for the engine's thread to copy layer by layer."""
    failed_keys: set[bytes] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    timed_out: bool = False
    kept: list[tuple[Run, Any]] = field(default_factory=list)
    """Number of leading blocks of each run that were read, and the host memory they are in."""
    done: threading.Event = field(default_factory=threading.Event)


class Loader:
    """The threads that load. ``pages`` has one per cluster, ``link`` a cache per part of a block."""

    def __init__(
        self,
        link: Link,
        pages: Sequence[Pages],
        counts: EngineCounts,
        *,
        timeout_s: float,
        bytes_max: int,
        threads: int,
    ) -> None:
        self._link = link
        self._pages = pages
        self._counts = counts
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._ended: queue.SimpleQueue[Loading] = queue.SimpleQueue()
        self._open = 0
        """Loads that ``ended`` has not returned yet."""
        self._threads = Tasks("kvstore-vllm-load", threads, QUEUE_MAX)
        self._own = threading.local()
        """Host memory of each thread for one part of a load: new memory costs as much in page faults as the read."""

    def begin(self, load: Load, *, keep: bool) -> Loading:
        """Starts a load; its time runs from now, including the wait for a thread."""
        loading = Loading(load, self._pages[0].now(), time.monotonic(), keep)
        self._open += 1
        if not self._threads.submit(partial(self._serve, loading)):
            self._give_up(loading, "too many loads wait")
            self._end(loading)
        return loading

    def ended(self, within_s: float) -> list[Loading]:
        """Returns the loads that ended since the last call; waits for one, if any goes on, at most ``within_s``."""
        ended = []
        with suppress(queue.Empty):
            if self._open and within_s:
                ended.append(self._ended.get(timeout=within_s))
            while True:
                ended.append(self._ended.get_nowait())
        self._open -= len(ended)
        return ended

    def close(self) -> None:
        """Ends idle threads; one stuck in a read ends with the process."""
        self._threads.close(0.0)

    def _serve(self, loading: Loading) -> None:
        try:
            self._load(loading)
        except Exception as error:  # noqa: BLE001 - a request must not wait for ever, whatever happened to its load
            self._give_up(loading, error)
        self._end(loading)

    def _end(self, loading: Loading) -> None:
        self._counts.add(EngineCount.LOAD_SECONDS, time.monotonic() - loading.started_s)
        self._counts.add(EngineCount.LOAD_FAILED_BLOCKS, len(loading.failed_keys))
        self._ended.put(loading)  # first: whoever waits for it looks there next
        loading.done.set()

    def _load(self, loading: Loading) -> None:
        for run in loading.load.runs:
            pages = self._pages[run.cluster]
            at_once = max(1, min(BLOCKS_MAX, self._bytes_max // pages.block_bytes))
            for start in range(0, len(run.keys), at_once):
                part = Run(run.cluster, run.keys[start : start + at_once], run.blocks[start : start + at_once])
                good = 0 if loading.failed_keys else self._read(loading, part, pages)
                # From the first missing block on, all must be computed anyway.
                loading.failed_keys.update(part.keys[good : good + 1])
                loading.failed_blocks.update(chain.from_iterable(part.blocks[good:]))

    def _read(self, loading: Loading, part: Run, pages: Pages) -> int:
        """Reads leading blocks of ``part`` and passes them on; returns their number."""
        caches = self._link.caches()
        if caches is None:
            return 0
        if time.monotonic() - loading.started_s > self._timeout_s:
            loading.timed_out = True
            return 0
        host = pages.host(len(part.keys)) if loading.keep else self._host(pages, len(part.keys))
        try:
            shards = zip(caches, pages.parts(host.numpy()), strict=True)
            hits = [all(each) for each in zip(*(cache.get(part.keys, rows) for cache, rows in shards), strict=True)]
        except KVStoreError:
            hits = [False] * len(part.keys)
        loading.timed_out = loading.timed_out or time.monotonic() - loading.started_s > self._timeout_s
        good = hits.index(False) if False in hits else len(hits)
        if good and loading.keep:
            loading.kept.append((Run(part.cluster, part.keys[:good], part.blocks[:good]), host))
        elif good:
            pages.write(host[:good], part.blocks[:good], loading.after)
        self._counts.add(EngineCount.LOADED_BLOCKS, good)
        self._counts.add(EngineCount.LOADED_BYTES, good * pages.block_bytes)
        return good

    def _host(self, pages: Pages, count: int) -> Any:
        """Returns memory of this thread for blocks that are copied on before it reads others."""
        memory = getattr(self._own, "memory", None)
        if memory is None or len(memory) < count * pages.block_bytes:
            self._own.memory = memory = pages.memory(count * pages.block_bytes)
        return pages.rows_of(memory, count)

    def _give_up(self, loading: Loading, why: object) -> None:
        log.error("kvstore: a load failed, its blocks are computed: %r", why)
        loading.kept.clear()
        for run in loading.load.runs:
            loading.failed_keys.update(run.keys[:1])
            loading.failed_blocks.update(chain.from_iterable(run.blocks))
