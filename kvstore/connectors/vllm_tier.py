"""vLLM's secondary tier: chunks of its CPU cache kept in a kvstore, under ``TieringOffloadingSpec``.

This file has everything that depends on vLLM's tiering interface, which changes with almost every release: vLLM 0.32.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.connectors.common import LazyStore, present
from kvstore.connectors.vllm.namespaces import KVTopology, check_hashes, model_fingerprint, namespaces
from kvstore.connectors.vllm.settings import SecondaryTierSettings
from kvstore.core.executor import Tasks
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest, KVStoreError

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""How long a shutdown waits for jobs of each kind."""


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks in a kvstore. The keys of its entry in ``secondary_tiers`` are those of ``SecondaryTierSettings``, and
    ``locality``, as vLLM's other tiers have it. Raises InvalidRequest (a ValueError) if KV cannot be shared.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = SecondaryTierSettings.of(given, "the entry in secondary_tiers")
        self.locality = Locality(locality) if locality is not None else None
        # The rows of the CPU cache, one per chunk: the store reads and writes them without a copy in between.
        self._chunks = np.frombuffer(primary_kv_view, np.uint8).reshape(-1, self.block_size_bytes)
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._store = LazyStore(settings, [_namespace(offloading_spec, settings, self.block_size_bytes)])
        self._finished: queue.SimpleQueue[tuple[JobResult, list[bytes], OffloadingEvent | None]] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._under_way = 0
        self._lookups = TierLookups(tier_type, self._store, settings)
        self._tells = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._events: list[OffloadingEvent] = []
        # vLLM bounds its jobs itself: each has chunks of the CPU cache.
        self._loading = Tasks("kvstore-vllm-tier-load", settings.load_threads, sys.maxsize)
        self._storing = Tasks("kvstore-vllm-tier-store", 1, sys.maxsize)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Returns no wishes of its own."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Returns HIT if the chunk is in the store, else MISS; RETRY while it is being looked up."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store chunks."""
        self._submit(self._storing, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to load chunks."""
        self._submit(self._loading, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that ended since the last call. Chunks that could not be loaded now count as absent."""
        results = []
        while not self._finished.empty():
            result, failed, event = self._finished.get()
            self._lookups.mark_miss(failed)
            if event is not None and self._tells:
                self._events.append(event)
            results.append(result)
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the chunks that were stored since the last call, and those that could not be loaded, as removed.

        vLLM adds tokens and parents if ``self_describing_kv_events`` is on.
        """
        events, self._events = self._events, []
        return events

    def has_pending_work(self) -> bool:
        """True while jobs are in progress: the engine must go on asking."""
        return self._under_way > 0 or not self._finished.empty()

    def on_schedule_end(self, context: Any) -> None:
        """Sends this step's look-ups."""
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets the look-ups of the request."""
        self._lookups.cleanup(req_context.req_id)

    def drain_jobs(self) -> None:
        """Returns when no job is in progress; each ends within the store's deadlines.

        vLLM calls it when the cache is reset, perhaps because weights were replaced in memory. So from now on the keys
        are this engine's alone: nothing says whether another engine has the same weights.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._under_way)
        self._lookups.era = os.urandom(16)

    def shutdown(self) -> None:
        """Ends the threads, after a short wait for jobs in progress, and closes the store."""
        self._loading.close(CLOSE_S)
        self._storing.close(CLOSE_S)
        self._lookups.shutdown()
        self._store.close()

    def _submit(self, threads: Tasks, job: TransferJob) -> None:
        with self._condition:
            self._under_way += 1
        keys = [bytes(key) for key in job.keys]
        if not threads.submit(partial(self._serve, job, keys, self._lookups.era)):
            self._end(job, keys, [False] * len(keys), 0.0)  # it is shut down

    def _serve(self, job: TransferJob, keys: list[bytes], era: bytes) -> None:
        began_s = time.monotonic()
        try:
            done = self._transfer(job, [key + era for key in keys])
        except Exception as error:
            if not isinstance(error, KVStoreError):
                log.exception("kvstore: a job of the tier failed")
            done = [False] * len(keys)
        self._end(job, keys, done, time.monotonic() - began_s)

    def _end(self, job: TransferJob, keys: list[bytes], done: list[bool], took_s: float) -> None:
        good = [key for key, hit in zip(keys, done, strict=True) if hit]
        these = tuple(key for key, hit in zip(job.keys, done, strict=True) if hit)
        result = JobResult(
            job_id=job.job_id,
            success=all(done),
            successful_keys=these if job.is_promotion and good and not all(done) else None,
            transfer_time=took_s,
            transfer_bytes=len(good) * self.block_size_bytes,
        )
        failed = [key for key, hit in zip(keys, done, strict=True) if not hit] if job.is_promotion else []
        self._finished.put((result, failed, self._event(failed if job.is_promotion else good, job.is_promotion)))
        with self._condition:
            self._under_way -= 1
            self._condition.notify_all()

    def _event(self, keys: list[bytes], removed: bool) -> OffloadingEvent | None:
        return OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality) if keys else None

    def _transfer(self, job: TransferJob, keys: Sequence[bytes]) -> list[bool]:
        caches = self._store.caches()
        if caches is None:
            return [False] * len(keys)
        rows = [self._chunks[int(chunk)] for chunk in job.chunk_ids]
        if job.is_promotion:
            return caches[0].get(keys, rows)
        places, done = self._places(job), [False] * len(keys)
        for run in _runs(places):
            names, blocks = [keys[number] for number in run], [rows[number] for number in run]
            try:
                flags = caches[0].put(names, blocks, first=places[run[0]].before)
            except KVStoreError:
                break  # routers still learn what was stored before
            for number, is_stored in zip(run, flags, strict=True):
                done[number] = is_stored
            if flags.reason:
                break
        return done

    def _places(self, job: TransferJob) -> list[_Place]:
        """Returns the place of each chunk of a job, whose keys vLLM gives in no order."""
        found = []
        for key in job.keys:
            group, end = get_offload_group_idx(key), job.req_context.get_offload_key_position(key)
            # Rounded up: vLLM may store the end of a prompt that is less than a chunk.
            found.append(_Place(group, -(-(end or 1) // self._chunk_tokens[group]) - 1))
        return found


class _Place(NamedTuple):
    """Where a chunk lies: its group of layers, and how many chunks of the prompt are before it."""

    group: int
    before: int


def _runs(places: Sequence[_Place]) -> list[list[int]]:
    """Returns the numbers of the chunks in runs of one group without gaps.

    So garbage collection knows where in its prompt each chunk lies, and takes the last ones first.
    """
    runs: list[list[int]] = []
    for number in sorted(range(len(places)), key=places.__getitem__):
        place = places[number]
        if runs and places[runs[-1][-1]] == (place.group, place.before - 1):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


class TierLookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own background look-ups, sent to the store."""

    def __init__(self, tier_type: str, store: LazyStore, settings: SecondaryTierSettings) -> None:
        self._store = store
        self._settings = settings
        self._paused_until_s = 0.0
        self.era = b""
        """Suffix of our keys, after vLLM's; empty until the cache is reset."""
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        """Returns one flag per key. Past the deadline they are absent, and for a while those of other requests too."""
        caches, began_s = self._store.caches(), time.monotonic()
        if caches is None or began_s < self._paused_until_s:
            return [False] * len(keys)
        try:
            return present(caches[0], [bytes(key) + self.era for key in keys])
        finally:
            # Also if the store gave up with an error, which vLLM treats as absent.
            if time.monotonic() - began_s >= self._settings.lookup_timeout_s:
                self._paused_until_s = time.monotonic() + self._settings.pause_s


def _namespace(spec: Any, settings: SecondaryTierSettings, chunk_bytes: int) -> Namespace:
    """The namespace of whole chunks: the KV of all workers, in the layout of the CPU cache."""
    vllm_config, kv_cache_config = _engine_configuration()
    if vllm_config.lora_config is not None:
        raise InvalidRequest(
            "the tier cannot see which requests have an adapter, and vLLM's hash does not cover an "
            "adapter's weights: start without --enable-lora, or use the connector "
            "(kvstore.connectors.vllm), which skips them"
        )
    check_hashes(vllm_config)
    fingerprint = settings.fingerprint or model_fingerprint(vllm_config)
    shape = KVTopology(vllm_config, kv_cache_config)
    base = namespaces(vllm_config, shape, fingerprint, settings.tenant)[0]
    tier = {
        "kept by": "tier",
        "chunk": f"{spec.blocks_per_chunk} blocks, {chunk_bytes} bytes",
        "canonical": str(spec.config.canonical_layout),
        "replicated": str(spec.config.replicated_layout),
        "workers": str(spec.config.parallel.world_size),
        "groups": _groups_digest(spec),
    }
    ranks = {"tp rank": "all", "pp rank": "all"}
    return Namespace.of(
        base.name, base.layout, fingerprint, settings.tenant, {**dict(base.attributes), **ranks, **tier}
    )


def _groups_digest(spec: Any) -> str:
    """Returns a digest of the layers of each group, in order: they say what lies where in a chunk."""
    groups = [(group.group_id, list(group.layer_names)) for group in spec.config.groups]
    return blake2b(json.dumps(groups).encode(), digest_size=16).hexdigest()


def _engine_configuration() -> tuple[Any, Any]:
    """Returns vLLM's whole configuration and that of its KV cache, taken from the frames of its callers.

    vLLM gives a tier an extract without RoPE scaling, quantisation and other overrides of the command line, and KV of
    another configuration must never be served. So the callers that have the whole are searched.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = [frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config")]
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
        frame = frame.f_back  # type: ignore[assignment]
    raise InvalidRequest(
        "this version of vLLM does not show a tier what it serves: use the connector (kvstore.connectors.vllm)"
    )
