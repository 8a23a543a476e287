"""The tools that the calls of one port share."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.caller import Caller
from kvstore.client.limits import ClientLimits
from kvstore.client.renewing import Renewing
from kvstore.counts import ClientCount
from kvstore.node.counters import Counts
from kvstore.wire.watch import Watch
from kvstore.writes import WriteMode


@dataclass(frozen=True, slots=True)
class Tools:
    """The caller, counters, limits, watch, lanes and lease renewal of one port."""

    caller: Caller
    counters: Counts[ClientCount]
    limits: ClientLimits
    watch: Watch
    lanes: FileLanes
    renewing: Renewing
    write: WriteMode | None
    """The default write mode of puts; None: the worker's."""
