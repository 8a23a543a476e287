"""The connector on a worker: loads blocks into this rank's KV memory, and stores those that were computed."""

from __future__ import annotations

import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstore.connectors.common import LazyStore, leading
from kvstore.connectors.vllm.blocks import BlockRange
from kvstore.connectors.vllm.gpu_copy import PART_BYTES, Copy, Pages
from kvstore.connectors.vllm.messages import IDLE_S, Load, Orders, WorkerReport
from kvstore.connectors.vllm.metrics import EngineCount, EngineCounts
from kvstore.connectors.vllm.namespaces import KVTopology
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.core.executor import Tasks
from kvstore.core.namespace import Namespace
from kvstore.errors import KVStoreError, Unavailable
from kvstore.transport.limits import BLOCKS_MAX

log = logging.getLogger(__name__)

LOAD_BYTES = 64 << 20
"""Host memory of one of the threads that load."""
DRAIN_S = 5.0
"""The time that a worker goes on storing when it shuts down."""
QUEUE_MAX = 65_536
"""Loads that may wait for a thread; each belongs to a request that the engine has."""


@dataclass(slots=True)
class Loading:
    """One load in progress."""

    load: Load
    after: Any
    started_s: float
    failed_keys: set[bytes] = field(default_factory=set)
    timed_out: bool = False


class Loader:
    """The threads that load. ``pages`` has one per cluster, ``store`` a cache per part of a block."""

    def __init__(
        self, settings: ConnectorSettings, store: LazyStore, pages: Sequence[Pages], counts: EngineCounts
    ) -> None:
        self._settings = settings
        self._store = store
        self._pages = pages
        self._counts = counts
        self._ended: queue.SimpleQueue[Loading] = queue.SimpleQueue()
        self._open = 0
        """Loads that ``ended`` has not returned yet."""
        self._threads = Tasks("kvstore-vllm-load", settings.load_threads, QUEUE_MAX)
        self._own = threading.local()
        """Host memory of each thread for one part of a load: new memory costs as much in page faults as the read."""

    def begin(self, load: Load) -> None:
        """Starts a load; its time runs from now, including the wait for a thread."""
        loading = Loading(load, self._pages[0].now(), time.monotonic())
        self._open += 1
        if not self._threads.submit(partial(self._serve, loading)):
            self._give_up(loading, "too many loads wait")
            self._end(loading)

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
        self._ended.put(loading)

    def _load(self, loading: Loading) -> None:
        for run in loading.load.runs:
            pages = self._pages[run.cluster]
            at_once = max(1, min(BLOCKS_MAX, LOAD_BYTES // pages.block_bytes))
            for start in range(0, len(run.keys), at_once):
                part = BlockRange(run.cluster, run.keys[start : start + at_once], run.blocks[start : start + at_once])
                good = 0 if loading.failed_keys else self._read(loading, part, pages)
                loading.failed_keys.update(part.keys[good : good + 1])

    def _read(self, loading: Loading, part: BlockRange, pages: Pages) -> int:
        """Reads leading blocks of ``part`` and passes them on; returns their number."""
        caches = self._store.caches()
        if caches is None or self._is_late(loading):
            return 0
        host = self._host(pages, len(part.keys))
        try:
            shards = zip(caches, pages.parts(host.numpy()), strict=True)
            hits = [all(each) for each in zip(*(cache.get(part.keys, rows) for cache, rows in shards), strict=True)]
        except KVStoreError:
            hits = [False] * len(part.keys)
        self._is_late(loading)
        good = leading(hits)
        if good:
            pages.write(host[:good], part.blocks[:good], loading.after)
        self._counts.add(EngineCount.LOADED_BLOCKS, good)
        self._counts.add(EngineCount.LOADED_BYTES, good * pages.block_bytes)
        return good

    def _is_late(self, loading: Loading) -> bool:
        """Returns, and notes, whether the load takes longer than it may."""
        loading.timed_out = loading.timed_out or time.monotonic() - loading.started_s > self._settings.load_timeout_s
        return loading.timed_out

    def _host(self, pages: Pages, count: int) -> Any:
        """Returns memory of this thread for blocks that are copied on before it reads others."""
        memory = getattr(self._own, "memory", None)
        if memory is None or len(memory) < count * pages.block_bytes:
            self._own.memory = memory = pages.memory(count * pages.block_bytes)
        return pages.rows_of(memory, count)

    def _give_up(self, loading: Loading, why: object) -> None:
        log.error("kvstore: a load failed, its blocks are computed: %r", why)
        for run in loading.load.runs:
            loading.failed_keys.update(run.keys[:1])


# Storing on a worker: full blocks are copied out within the step that filled them, and published in the background.
#
# The copy keeps the rest simple: the engine may reuse the blocks immediately (of a finished, preempted or aborted
# request), and a store that hangs costs only our own memory, which is bounded.


AT_ONCE_MAX = 2_048
"""Blocks copied out and put in one batch: their descents fit into one put (kvstore/transport/limits.py)."""


class Storer:
    """One thread that publishes. ``pages`` has one per cluster, ``store`` a cache per part of a block."""

    def __init__(
        self,
        settings: ConnectorSettings,
        store: LazyStore,
        pages: Sequence[Pages],
        counts: EngineCounts,
        *,
        first_part: int = 0,
    ) -> None:
        """``first_part`` is the number of the first part of each block that is stored here."""
        self._settings = settings
        self._store = store
        self._pages = pages
        self._counts = counts
        self._first_part = first_part
        self._paused_until_s = 0.0
        self._lock = threading.Lock()
        self._bytes = 0
        self._on_the_way: set[bytes] = set()
        self._idle = threading.Event()
        self._idle.set()
        # store_bytes_max bounds what waits, so the queue itself needs no bound of its own.
        self._thread = Tasks("kvstore-vllm-store", 1, sys.maxsize)

    def store(self, run: BlockRange) -> None:
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
                except Exception as error:  # noqa: BLE001 - the device's too: the engine's step must go on
                    log.warning("kvstore: blocks are not stored: %s", error)
                    is_begun = False
                if not is_begun:
                    self._done(part, [False] * len(part.keys))

    def _admit(self, run: BlockRange) -> BlockRange | None:
        """Returns the blocks of ``run`` to copy out, and counts their memory from now on; None if there are none."""
        is_down = self._store.caches() is None or time.monotonic() < self._paused_until_s
        with self._lock:
            run = run.picked([at for at, key in enumerate(run.keys) if key not in self._on_the_way])
            keys = run.keys
            size = len(keys) * self._pages[run.cluster].block_bytes
            is_shed = is_down or self._bytes + size > self._settings.store_bytes_max
            if keys and not is_shed:
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

    def _serve(self, run: BlockRange, copy: Copy) -> None:
        flags: list[bool] = []
        try:
            flags = self._publish(run, copy)
        except Exception:
            log.exception("kvstore: blocks could not be stored")
        self._done(run, flags or [False] * len(run.keys))

    def _done(self, run: BlockRange, flags: Sequence[bool]) -> None:
        size, stored = self._pages[run.cluster].block_bytes, sum(flags)
        self._counts.add(EngineCount.STORED_BLOCKS, stored)
        self._counts.add(EngineCount.STORED_BYTES, stored * size)
        self._counts.add(EngineCount.STORE_FAILED_BLOCKS, len(run.keys) - stored)
        with self._lock:
            self._bytes -= len(run.keys) * size
            self._on_the_way.difference_update(run.keys)
            if not self._on_the_way:
                self._idle.set()

    def _publish(self, run: BlockRange, copy: Copy) -> list[bool]:
        """Returns whether each block is in the store; nothing if none is."""
        caches = self._store.caches()
        if caches is None or time.monotonic() < self._paused_until_s:
            return []
        if run.seal is not None and not run.seal.holds():
            return []
        try:
            hints = run.hints
            ttl = math.inf if hints.ttl_s is None else hints.ttl_s
            parts = self._pages[run.cluster].parts(copy.rows())
            stored = [
                cache.put(
                    *(run.keys, part),
                    first=run.first,
                    descents=run.descents if number == 0 else (),
                    priority=hints.priority,
                    ttl=ttl,
                )
                for number, (cache, part) in enumerate(zip(caches, parts, strict=True), self._first_part)
            ]
            return [all(each) for each in zip(*stored, strict=True)]
        except Unavailable:
            # The next ones would wait as long: drop them until the store may be well again.
            self._paused_until_s = time.monotonic() + self._settings.pause_s
        except KVStoreError as error:
            log.warning("kvstore: the store refuses blocks: %s", error)
        return []


# A worker's half: carries out the scheduler's orders on this rank's KV memory, and reports the results.


class WorkerHalf:
    """The connector's state on one rank, whose KV has these ``namespaces``. Used by its engine thread alone."""

    def __init__(
        self, settings: ConnectorSettings, shape: KVTopology, namespaces: Mapping[int, Namespace], *, stores: bool
    ) -> None:
        self._settings = settings
        self.shape = shape
        self._stores = stores
        self._first_part = min(namespaces)
        self.counts = EngineCounts()
        self._store = LazyStore(settings, list(namespaces.values()))
        self._pages: list[Pages] = []
        self._loader: Loader | None = None
        self._storer: Storer | None = None
        self._is_idle = False
        self._report = WorkerReport(namespaces=dict(namespaces))
        self._failed_requests: set[str] = set()

    def register(self, kv_caches: dict[str, Any], kv_cache_config: Any) -> None:
        """Implements ``register_kv_caches``. Raises InvalidRequest for memory that is not divided into blocks."""
        self._pages = [
            Pages(
                [
                    {name: kv_caches[name] for name in kv_cache_config.kv_cache_groups[group].layer_names}
                    for group in cluster.groups
                ],
                kv_cache_config.num_blocks,
                self.shape.parts_per_rank,
            )
            for cluster in self.shape.clusters
        ]
        self._loader = Loader(self._settings, self._store, self._pages, self.counts)
        self._storer = Storer(self._settings, self._store, self._pages, self.counts, first_part=self._first_part)

    # Loading

    def start_loads(self, orders: Orders) -> None:
        """Implements ``start_load_kv``."""
        assert self._loader is not None
        self._is_idle = orders.is_idle
        for load in orders.loads:
            self._loader.begin(load)

    def finished_loads(self) -> set[str]:
        """Returns the requests whose loads ended since the last call.

        Waits for a moment if the engine has nothing to compute before one ends.
        """
        finished = set()
        assert self._loader is not None
        for loading in self._loader.ended(IDLE_S if self._is_idle else 0.0):
            finished.add(loading.load.request)
            self._report.timed_out = self._report.timed_out or loading.timed_out
            if loading.failed_keys:
                self._report.failed |= loading.failed_keys
                self._failed_requests.add(loading.load.request)
        return finished

    def failed_requests(self) -> set[str]:
        """Returns the requests whose loads failed: vLLM asks for them again, and the failed blocks are avoided.

        Never the blocks themselves: with several groups of KV, vLLM stops at such a report.
        """
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self) -> WorkerReport | None:
        """Implements ``build_connector_worker_meta``."""
        report, self._report = self._report, WorkerReport()
        return None if report.is_empty else report

    # Storing

    def finish_step(self, orders: Orders) -> None:
        """Implements ``wait_for_save``: copies out the blocks that this step filled, for publishing."""
        stores, orders.stores = orders.stores, []
        if not self._stores:
            return
        assert self._storer is not None
        for each in stores:
            self._storer.store(each)

    def close(self) -> None:
        """Stores blocks in progress for a while, then closes the store."""
        if self._storer is not None:
            self._storer.close(DRAIN_S)
        if self._loader is not None:
            self._loader.close()
        self._store.close()
