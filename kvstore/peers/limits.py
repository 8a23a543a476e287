"""Every limit and timing between peers in one place, with their relations checked once."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.validate import check_limits
from kvstore.errors import InvalidRequest

STEP_BYTES_MAX = 1_000_000
"""Digests that are written in one request: etcd accepts at most 1.5 MB."""


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """The limits of a node among peers. Raises InvalidRequest for invalid values or relations."""

    sync_interval_s: float = 1.0
    """Shortest time between two writes of one digest; others' knowledge of this node is at least that stale."""
    bytes_per_s: int = 1 << 20
    """Digests that this node may write to etcd per second; the rest waits."""
    all_bytes_per_s: int = 4 << 20
    """Limit for all nodes together; each takes an equal share. Every node receives these bytes, and an etcd that keeps
    five minutes of history, in its 2 GiB, has to hold 300 times as much.
    """
    meta_deadline_s: float = 2.0
    """Deadline of a call to etcd."""
    follow_s: float = 0.5
    """How long the follower waits for news before it checks peers that were set aside."""
    prints_max: int = 1 << 23
    """Remembered prints of all peers, 8 bytes each; beyond it, each peer gets an equal share."""
    answer_s: float = 2.0
    """A peer that moves no byte for this long has failed; a fetch may take this long plus its bytes' time."""
    bytes_per_s_min: int = 64 << 20
    """A peer slower than this on the whole is given up: the disk or the root may be faster."""
    links_max: int = 4
    """Bulk connections to one peer, each for one fetch at a time; another fetch waits for one."""
    tries_max: int = 3
    """Peers that may fail, or lack what they reported, in one fetch."""
    aside_s_min: float = 1.0
    """How long a peer that failed is left alone; doubles with each failure in a row."""
    aside_s_max: float = 30.0
    """Limit of that doubling."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.aside_s_max < self.aside_s_min:
            raise InvalidRequest(f"aside_s_max={self.aside_s_max} is under aside_s_min={self.aside_s_min}")

    def rate_bytes_per_s(self, peers: int) -> float:
        """Returns the bytes that this node may write per second if it has ``peers`` peers."""
        return min(self.bytes_per_s, self.all_bytes_per_s / (peers + 1))
