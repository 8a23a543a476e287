"""Every limit and timing of a worker in one place, with the relations between them checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from kvstore.errors import InvalidRequest

VALUE_MAX = 1 << 60
"""What a message about limits can say."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker allows its clients. Raises InvalidRequest where a value makes no sense."""

    calls_max: int = 64
    """Calls at once, one thread each; more are refused, to be repeated at another worker. It can be raised while the
    worker runs, to ``RAISE_MAX`` times as many.
    """
    spare_calls_max: int = 8
    """Calls beyond these: health, reflection, stats, renewals and releases of holds, and saying that there are too
    many.
    """
    bytes_in_flight_max: int = 1 << 30
    """Memory for payload between network and root. A call that needs more than is free is refused."""
    behind_bytes_max: int = 256 << 20
    """A put behind of more bytes over the network waits for the root: all of them would be in memory at once."""
    arena_bytes_max: int = 1 << 30
    """Memory of its own that one client on this host may share over one connection."""
    buffers_bytes_max: int = 256 << 20
    """Memory that is kept to receive and send with again."""
    connections_max: int = 8192
    """gRPC connections at once, one file descriptor each; more are closed."""
    bulk_connections_max: int = 1024
    """Bulk connections at once, one file descriptor each; more are closed."""
    hello_s: float = 5.0
    """A bulk connection that has not proved its grant after so long is closed; a grant not used by then is void."""
    window_bytes: int = 4 << 20
    """Payload read in one go while as much is being sent."""
    idle_s: float = 15.0
    """A stream on which the client moves nothing for so long is cancelled."""
    stream_s_max: float = 900.0
    """A stream that takes longer is cancelled."""
    holds_max: int = 10_000
    """Holds of clients alive at once."""
    hold_lease_s: float = 30.0
    """A client's hold ends so long after it was taken, renewed or read under: so a killed client delays no collection
    for longer. Clients renew after a quarter of it, and may stall for the rest.
    """
    hold_tokens_max: int = 1 << 28
    """Tokens of all held prompts together, 4 bytes each."""
    recode_bytes_per_s_max: float = 256 << 20
    """How fast chunks are compressed or re-encrypted by tickets, as they are read: clients need the root as well."""
    health_period_s: float = 0.5
    """How often it is looked whether the root still answers."""

    RAISE_MAX: ClassVar[int] = 4
    """How many times ``calls_max`` it can be raised to while the worker runs."""

    @property
    def threads_max(self) -> int:
        """Threads for calls, made as they are needed."""
        return self.RAISE_MAX * self.calls_max + self.spare_calls_max

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not value > 0:
                raise InvalidRequest(f"limit {each.name}={value!r}: expected more than 0")
            if value > VALUE_MAX:
                raise InvalidRequest(f"limit {each.name} is too large: expected at most {VALUE_MAX}")
        if self.stream_s_max < self.idle_s:
            raise InvalidRequest(
                f"stream_s_max={self.stream_s_max} is under idle_s={self.idle_s}: a stream must outlast a pause in it"
            )
