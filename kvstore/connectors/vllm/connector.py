"""The class that vLLM loads: it passes calls to the half that runs in this process. And its metrics."""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.connectors.vllm.descents import Describer
from kvstore.connectors.vllm.messages import Orders, WorkerReport
from kvstore.connectors.vllm.metrics import EngineCount
from kvstore.connectors.vllm.namespaces import KVTopology, check_hashes, check_heads, model_fingerprint, namespaces
from kvstore.connectors.vllm.scheduler import SchedulerHalf
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.connectors.vllm.worker import WorkerHalf

log = logging.getLogger(__name__)


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Counts since they were last taken; ``data`` maps the flat name of an ``EngineCount`` to its count."""

    def reset(self) -> None:
        self.data: dict[str, int | float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvstore {name}": round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One metric for each ``EngineCount``, labelled as vLLM labels its own."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for counter in EngineCount:
            name = counter.flat_name
            metric = self._counter_cls(
                name=f"vllm:kvstore_{name}", documentation=f"{counter.about}.", labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if (engine_idx, name) in self._counters:
                self._counters[engine_idx, name].inc(count)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV in a kvstore, shared by all engines with the same model and settings.

    ``ConnectorSettings`` describes ``kv_connector_extra_config``. Raises InvalidRequest (a ValueError) if the settings,
    the model or vLLM's configuration do not allow KV to be shared.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.of(transfer.kv_connector_extra_config, "kv_connector_extra_config")
        check_hashes(vllm_config)
        shape = KVTopology(vllm_config, kv_cache_config, settings.tp_shards)
        names = namespaces(vllm_config, shape, settings.fingerprint or model_fingerprint(vllm_config), settings.tenant)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        loads, stores = transfer.is_kv_consumer, transfer.is_kv_producer
        if role is KVConnectorRole.SCHEDULER:
            if loads and transfer.kv_load_failure_policy == "fail":
                log.warning(
                    "kvstore: kv_load_failure_policy is fail, so a request whose KV cannot be read ends without "
                    "output; set it to recompute"
                )
            describer = Describer(shape.clusters, shape.hash_tokens)
            self._scheduler = SchedulerHalf(
                *(settings, shape, names),
                loads=loads,
                stores=stores,
                describer=describer if settings.descents else None,
                waits=vllm_config.parallel_config.data_parallel_size == 1,
            )
        else:
            parts, is_writer = shape.parts_of(vllm_config.parallel_config.rank)
            mine = {part: names[part] for part in parts}
            self._worker = WorkerHalf(settings, shape, mine, stores=stores and is_writer)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KV that was not stored is a later miss, never a request that cannot go on."""
        return False

    # In the scheduler's process

    @property
    def _scheduling(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduling.manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the tokens in the store beyond the engine's own; None while they are being looked up."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """Returns the blocks that the workers load and store in this step."""
        return self._scheduling.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduling.learn(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request. Its full blocks were copied out already, so vLLM may reuse them immediately."""
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``, for models with several kinds of KV."""
        self._scheduling.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """Abandons all KV stored so far: vLLM calls this when weights were replaced in memory."""
        self._scheduling.reset()
        return True

    # On a worker

    @property
    def _working(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    @property
    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._working.shape.is_canonical:
            check_heads(self._vllm_config, self._kv_cache_config, kv_caches)
        self._working.register(kv_caches, self._kv_cache_config)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Ends the step before if vLLM did not: on all pipeline stages but the last, if it decodes speculatively."""
        if self.has_connector_metadata():
            self.wait_for_save()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request waits for its KV before it takes part in a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: a block is stored with all its layers, so it is copied out when the last one is computed."""

    def wait_for_save(self) -> None:
        """Copies out the blocks to store; they are published in the background."""
        self._working.finish_step(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(
            finished_recving=self._working.finished_loads(), failed_recving=self._working.failed_requests()
        )

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._working.report()

    # Both

    def get_kv_connector_stats(self) -> Stats | None:
        """Returns the counts since the last call."""
        counts = (self._scheduler or self._working).counts.take()
        return Stats(data=counts) if counts else None

    def shutdown(self) -> None:
        """Stores blocks in progress for a while, then closes the store."""
        (self._scheduler or self._working).close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
