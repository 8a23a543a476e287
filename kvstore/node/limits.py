"""Every limit and timing of a node in one place, with their relations checked once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvstore.checks import check_limits
from kvstore.errors import InvalidRequest
from kvstore.meta.store import TIMEOUT_S_MAX
from kvstore.recency import QUANTUM_S

CHANGEABLE = (
    "match_deadline_s",
    "read_deadline_s",
    "write_deadline_s",
    "behind_share",
    "operations_max",
    "pins_per_owner_max",
    "pins_max",
)
"""The limits that may change while the node runs, because nothing was allocated by them."""
LANES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a node. Raises InvalidRequest if a value or a relation makes no sense."""

    match_deadline_s: float = 5.0
    """A match that takes longer is a miss."""
    read_deadline_s: float = 15.0
    """A read that takes longer is a miss; nothing writes into its memory afterwards."""
    write_deadline_s: float = 30.0
    """A put that takes longer is shed: it raises Unavailable, and what was published stays."""
    meta_deadline_s: float = 5.0
    """Deadline of a call to etcd."""
    stall_s: float = 5.0
    """If every lane has been in one file-system call for this long, the root counts as hung, and calls fail at once."""
    lanes: int = 16
    """Threads that make file-system calls."""
    width: int = min(16, (os.cpu_count() or 1) + 1)
    """Lanes that one request may use at once. One more than cores: while one waits for the GIL, the others copy."""
    queue_max: int = 1024
    """Requests that may wait for a lane; more are refused with Overloaded."""
    known_max: int = 1 << 20
    """Addresses remembered as present (a power of two, rounded down), 12 bytes each, allocated at the start."""
    chains_bytes_max: int = 32 << 20
    """Memory for recent prompts and their addresses: a prompt that begins like one hashes only its new tokens."""
    quantum_s: int = QUANTUM_S
    """Recency is renewed once per quantum; a remembered presence is trusted for one to two quanta."""
    hold_max_s: float = 300.0
    """A hold ends by itself after this time."""
    announce_s: float = 0.05
    """At most one announcement to collectors in this time; they ask for fewer if there are many nodes."""
    announce_lag_max_s: float = 330.0
    """A node that has not announced a sweep for this long stops its keepalives, so that collectors go on."""
    follow_s: float = 0.25
    """Time that the follower of garbage collection waits for events before it checks whether an announcement is due."""
    gap_check_s: float = 10.0
    """After this long without an event, the watch is checked against etcd."""
    holds_max: int = 100_000
    """Limit on holds alive at once."""
    refresh_queue_max: int = 4096
    """Chains that may wait to have their recency renewed; more are dropped and counted."""
    pins_per_owner_max: int = 1_000
    """Pins that one owner may have. Advisory, as the next limit: pins taken at the same moment may pass it by a few."""
    pins_max: int = 10_000
    """Pins of the whole store: collectors read them all."""
    behind_share: float = 0.5
    """Share of memory that may wait to be written to the root."""
    behind_wait_s: float = 2.0
    """How long a put behind waits for room in that share; the chunks that find none by then are shed."""
    behind_give_up_s: float = 60.0
    """A chunk that could not be written to the root for this long is lost."""
    flush_s: float = 10.0
    """Limit on the time that a closing node spends writing chunks that the root lacks."""
    operations_max: int = 32
    """Operations (prefetch, clear) that may be unfinished; more are refused with Overloaded."""
    prefetch_deadline_s: float = 600.0
    """A prefetch that takes longer fails; what it has brought stays."""
    open_files_max: int = 256
    """Files that one layer-by-layer read keeps open, and, without native code, one view."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.lanes > LANES_MAX:
            raise InvalidRequest(f"lanes={self.lanes}: expected at most {LANES_MAX} threads")
        if self.behind_share > 1:
            raise InvalidRequest(f"behind_share={self.behind_share}: expected a share of memory, at most 1")
        if self.meta_deadline_s > TIMEOUT_S_MAX:
            raise InvalidRequest(f"meta_deadline_s={self.meta_deadline_s}: expected at most {TIMEOUT_S_MAX:g}")
        if self.width > self.lanes:
            raise InvalidRequest(f"width={self.width} is over lanes={self.lanes}: a request cannot use more")
        if self.announce_lag_max_s <= self.hold_max_s + self.announce_s:
            raise InvalidRequest(
                f"announce_lag_max_s={self.announce_lag_max_s} leaves no room beside hold_max_s={self.hold_max_s} and "
                f"announce_s={self.announce_s}: "
                "a node that holds too much to name it announces once those holds have ended"
            )
        if self.hold_max_s < self.read_deadline_s:
            raise InvalidRequest(
                f"hold_max_s={self.hold_max_s} is under read_deadline_s={self.read_deadline_s}: "
                "a hold must outlast the read it protects"
            )


class CurrentLimits:
    """The limits of one node as they are now.

    Each part of the node that obeys one of ``CHANGEABLE`` reads it here whenever it needs it, so one assignment changes
    it for all of them; what is under way goes on as it was.
    """

    __slots__ = ("now",)

    def __init__(self, limits: Limits) -> None:
        self.now = limits
