"""Every timing and limit of a client."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.validate import check_limits
from kvstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits on waiting for workers and on a client's resources. Raises InvalidRequest for senseless values."""

    match_s: float = 5.0
    """Limit for a match or a hold; past it, a miss."""
    read_s: float = 15.0
    """Limit without a byte during a read; past it, the missing chunks are misses."""
    write_s: float = 30.0
    """Limit for a put, in addition to the time for its bytes; past it, Unavailable."""
    pin_s: float = 6.0
    """Limit for pins, refcounts and namespaces; a worker that waits 5 s for etcd can still say so."""
    clear_s: float = 630.0
    """Limit for clearing a namespace, which may visit every folder of the root."""
    bytes_per_s_min: int = 32 << 20
    """Minimum average speed of a stream; a slower one is cancelled."""
    arena_bytes_max: int = 512 << 20
    """Memory shared with one worker on this host for puts; allocated on demand, and kept."""
    bulk_links_max: int = 8
    """Bulk connections to one worker, each for one call at a time; further calls go over gRPC."""
    leases_max: int = 256
    """Live leases on one worker's memory, one file descriptor each; further views are copies."""
    bulk_retry_s: float = 5.0
    """Pause before another attempt to connect to a worker that offered only gRPC; doubles up to 2 minutes."""
    stats_s: float = 5.0
    """For asking workers what they counted."""
    probe_s: float = 2.0
    """Limit for a health probe."""
    probe_pause_s_min: float = 0.1
    """First pause between two probes of a worker that was set aside; doubles each time."""
    probe_pause_s_max: float = 2.0
    """Longest pause between two such probes."""
    refresh_s: float = 5.0
    """Interval at which the list and the health of all workers is read."""
    affinity_slack: int = 2
    """A worker keeps the prompts that it saw before unless it has this many calls more than the idlest one."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.probe_pause_s_max < self.probe_pause_s_min:
            raise InvalidRequest(
                f"probe_pause_s_max={self.probe_pause_s_max} is under probe_pause_s_min={self.probe_pause_s_min}"
            )
