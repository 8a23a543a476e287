"""A worker's half: carries out the scheduler's orders on this rank's KV memory, and reports the results."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

from kvstore.connectors.vllm.counts import EngineCounts
from kvstore.connectors.vllm.gpu_copy import Pages
from kvstore.connectors.vllm.link import Link
from kvstore.connectors.vllm.loading import Loader, Loading
from kvstore.connectors.vllm.messages import IDLE_S, Orders, Report
from kvstore.connectors.vllm.naming import Shape
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.storing import Storer
from kvstore.namespace import Namespace

log = logging.getLogger(__name__)


class WorkerHalf:
    """The connector's state on one rank, whose KV has these ``namespaces``. Used by its engine thread alone."""

    def __init__(
        self,
        settings: Settings,
        shape: Shape,
        namespaces: Mapping[int, Namespace],
        *,
        stores: bool,
        tells: bool = False,
    ) -> None:
        """``tells``: report what came into the store, for events."""
        self._settings = settings
        self.shape = shape
        self._stores = stores
        self._tells = tells and stores
        self._parts = sum(1 << part for part in namespaces)
        self.counts = EngineCounts()
        self._link = Link(settings, list(namespaces.values()))
        self._pages: list[Pages] = []
        self._loader: Loader | None = None
        self._storer: Storer | None = None
        self._is_async = shape.is_async(settings)
        self._is_idle = False
        self._syncing: list[Loading] = []
        self._scattered: set[str] = set()
        self._report = Report(digests={(part, each.digest) for part, each in namespaces.items()})
        self._failed_blocks: set[int] = set()
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
        settings = self._settings
        self._loader = Loader(
            self._link,
            self._pages,
            self.counts,
            timeout_s=settings.load_timeout_s,
            bytes_max=settings.load_bytes_max,
            threads=settings.load_threads,
        )
        self._storer = Storer(
            self._link,
            self._pages,
            self.counts,
            bytes_max=settings.store_bytes_max,
            pause_s=settings.pause_s,
            tells=self._tells,
        )

    # Loading

    def start_loads(self, orders: Orders) -> None:
        """Implements ``start_load_kv``. Waits for synchronous loads here, or layer by layer."""
        assert self._loader is not None
        self._is_idle = orders.is_idle
        for load in orders.loads:
            loading = self._loader.begin(load, keep=not self._is_async)
            if not self._is_async:
                self._syncing.append(loading)
        if self._syncing and not self._settings.layerwise:
            for pages in self._pages:
                for layer in pages.layers:
                    self._scatter(layer)

    def wait_for_layer(self, layer: str) -> None:
        """Implements ``wait_for_layer_load``."""
        if self._syncing and layer not in self._scattered:
            self._scatter(layer)

    def _scatter(self, layer: str) -> None:
        """Copies one layer of the KV loaded for this step to where the model reads it."""
        self._scattered.add(layer)
        for loading in self._syncing:
            loading.done.wait()
            for run, host in loading.kept:
                pages = self._pages[run.cluster]
                if layer in pages.layers:
                    pages.scatter_layer(layer, run.blocks, host[: len(run.blocks)])

    def _end_syncing(self) -> None:
        """Ends the step. A load is failed if the model did not ask for one of its layers: it computed without it."""
        missed = {layer for pages in self._pages for layer in pages.layers} - self._scattered
        for loading in self._syncing:
            loading.done.wait()
            for run, _ in loading.kept if missed else ():
                loading.failed_keys.update(run.keys[:1])
                loading.failed_blocks.update(chain.from_iterable(run.blocks))
        if self._syncing and missed:
            log.error("kvstore: layerwise loads do not work with this model, set layerwise to false: %s", min(missed))
        self._syncing.clear()
        self._scattered.clear()

    def finished_loads(self) -> set[str]:
        """Returns the requests whose asynchronous loads ended since the last call.

        Waits for a moment if the engine has nothing to compute before one ends.
        """
        finished = set()
        assert self._loader is not None
        for loading in self._loader.ended(IDLE_S if self._is_idle else 0.0):
            report, number = self._report, loading.load.number
            report.ended[number] = report.ended.get(number, 0) + 1
            report.timed_out = report.timed_out or loading.timed_out
            if loading.failed_keys:
                report.failed[number] = loading.failed_keys
                self._failed_blocks |= loading.failed_blocks
            if self._is_async:
                finished.add(loading.load.request)
                if loading.failed_keys:
                    self._failed_requests.add(loading.load.request)
        return finished

    def failed_requests(self) -> set[str]:
        """Returns the requests whose loads failed, if nothing that was loaded for them can be used."""
        failed, self._failed_requests = self._failed_requests, set()
        return set() if self.shape.is_plain else failed

    def failed_blocks(self) -> set[int]:
        """Implements ``get_block_ids_with_load_errors``."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed if self.shape.is_plain else set()

    def report(self) -> Report | None:
        """Implements ``build_connector_worker_meta``."""
        report, self._report = self._report, Report()
        if self._tells and self._storer is not None:
            for key, is_stored in self._storer.settled(IDLE_S if self._is_idle else 0.0).items():
                if is_stored:
                    report.stored[key] = self._parts
                else:
                    report.unstored.add(key)
        return None if report.is_empty else report

    # Storing

    def finish_step(self, orders: Orders) -> None:
        """Implements ``wait_for_save``: copies out the blocks that this step filled, for publishing."""
        self._end_syncing()
        stores, orders.stores = orders.stores, []
        if not self._stores:
            return
        assert self._storer is not None
        for each in stores:
            self._storer.store(each)

    def close(self) -> None:
        """Stores blocks in progress for a while, then closes the store."""
        if self._storer is not None:
            self._storer.close(self._settings.drain_s)
        if self._loader is not None:
            self._loader.close()
        self._link.close()
