"""What the calls of one port share."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.caller import Caller
from kvstore.client.limits import ClientLimits
from kvstore.client.renewing import Renewing
from kvstore.counts import ClientCount, Counts
from kvstore.wire.watch import Watch
from kvstore.writes import WriteMode


@dataclass(frozen=True, slots=True)
class Tools:
    """Who sends calls, who counts, who looks at the time, who reads files, who renews holds."""

    caller: Caller
    counters: Counts[ClientCount]
    limits: ClientLimits
    watch: Watch
    lanes: FileLanes
    renewing: Renewing
    write: WriteMode | None
    """The mode of puts that do not say one; None: the worker's."""
