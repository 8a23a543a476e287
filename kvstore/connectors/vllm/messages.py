"""Messages between the scheduler's half of the connector and the workers' halves, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvstore.connectors.vllm.blocks import BlockRange
from kvstore.core.namespace import Namespace

IDLE_S = 0.005
"""The longest wait in a step that computes nothing: without one, vLLM runs hundreds of such steps while KV is loaded.
A request that arrives during the wait is delayed no longer than this."""


@dataclass(frozen=True, slots=True)
class Load:
    """KV to be read for one request."""

    request: str
    runs: list[BlockRange]


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every worker."""

    loads: list[Load] = field(default_factory=list)
    stores: list[BlockRange] = field(default_factory=list)
    is_idle: bool = False
    """True if the engine computes nothing in this step: then a worker may wait for a moment."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' message to the scheduler."""

    failed: set[bytes] = field(default_factory=set)
    """The first key of each load that could not be read."""
    timed_out: bool = False
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    """The names of these workers' KV by part, in their first report."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Returns both reports in one."""
        assert isinstance(other, WorkerReport)
        timed_out, namespaces = self.timed_out or other.timed_out, self.namespaces | other.namespaces
        return WorkerReport(self.failed | other.failed, timed_out, namespaces)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return not (self.failed or self.timed_out or self.namespaces)
