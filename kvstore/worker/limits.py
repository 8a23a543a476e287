"""Every limit and timing of a worker, and the relations between them, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.validate import check_limits
from kvstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """A worker's limits for its clients. Raises InvalidRequest for an invalid value."""

    calls_max: int = 64
    """Concurrent calls, one thread each; more are refused, and the client repeats them at another worker."""
    spare_calls_max: int = 8
    """Further concurrent calls: health, reflection, stats, renewals and releases of holds, and refusals."""
    bytes_in_flight_max: int = 1 << 30
    """Memory for payload between network and root. A call that needs more than is free is refused."""
    arena_bytes_max: int = 1 << 30
    """Memory that one client on this host may share over one connection."""
    buffers_bytes_max: int = 256 << 20
    """Memory kept in reusable buffers."""
    connections_max: int = 8192
    """Concurrent gRPC connections, one file descriptor each; more are closed."""
    bulk_connections_max: int = 1024
    """Concurrent bulk connections, one file descriptor each; more are closed."""
    hello_s: float = 5.0
    """Time to use and prove a grant; after that the connection is closed and the grant void."""
    window_bytes: int = 4 << 20
    """Payload read in one step while as much is being sent."""
    idle_s: float = 15.0
    """A stream on which the client moves nothing for this long is cancelled."""
    stream_s_max: float = 900.0
    """A stream that takes longer is cancelled."""
    holds_max: int = 10_000
    """Live holds of clients."""
    hold_lease_s: float = 30.0
    """A client's hold ends this long after it was taken, renewed or read under, which bounds the delay of garbage
    collection by a killed client. Clients renew after a quarter of it, and may stall for the rest.
    """
    hold_tokens_max: int = 1 << 28
    """Tokens of all held prompts together, 4 bytes each."""
    health_period_s: float = 0.5
    """Interval between two looks at whether the root still answers."""

    @property
    def threads_max(self) -> int:
        """Maximum of threads for calls, started on demand."""
        return self.calls_max + self.spare_calls_max

    def __post_init__(self) -> None:
        check_limits(self)
        if self.stream_s_max < self.idle_s:
            raise InvalidRequest(
                f"stream_s_max={self.stream_s_max} is under idle_s={self.idle_s}: a stream must outlast a pause in it"
            )
