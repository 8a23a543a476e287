"""Every timing of a client in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """How long a client waits for workers. Raises InvalidRequest where a value makes no sense."""

    match_s: float = 5.0
    """For a match or a hold; past it, a miss."""
    read_s: float = 15.0
    """Without a byte of what is read; past it, what has not come is a miss."""
    write_s: float = 30.0
    """For a put, beside the time its bytes take; past it, Unavailable."""
    pin_s: float = 5.0
    """For pins, refcounts and namespaces."""
    move_s: float = 630.0
    """For a prefetch or move, which the worker ends after 600 s."""
    clear_s: float = 630.0
    """For clearing a namespace, which may visit every folder of the root."""
    bytes_per_s_min: int = 32 << 20
    """A stream that is slower than this on the whole is given up."""
    arena_bytes_max: int = 512 << 20
    """Memory shared with one worker of this host for puts; taken when it is needed, and kept."""
    bulk_links_max: int = 8
    """Bulk connections to one worker, each for one call at a time; more calls at once go over gRPC."""
    stats_s: float = 5.0
    """For asking workers what they counted."""
    probe_s: float = 2.0
    """For asking a worker how it is."""
    probe_pause_s_min: float = 0.1
    """Between two such questions to a worker that was set aside; doubles each time."""
    probe_pause_s_max: float = 2.0
    """What it doubles up to."""
    refresh_s: float = 5.0
    """Between two looks at the list of workers, and at the health of all of them."""
    affinity_slack: int = 2
    """Calls by which a worker may be busier than the idlest one and still get the prompts it has seen before."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise InvalidRequest(f"limit {each.name}={getattr(self, each.name)!r}: expected more than 0")
        if self.probe_pause_s_max < self.probe_pause_s_min:
            raise InvalidRequest(
                f"probe_pause_s_max={self.probe_pause_s_max} is under probe_pause_s_min={self.probe_pause_s_min}"
            )

    def stream_s(self, first_s: float, size_bytes: int) -> float:
        """The deadline of a stream of at most ``size_bytes``, beside ``first_s``."""
        return first_s + size_bytes / self.bytes_per_s_min
