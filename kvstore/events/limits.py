"""Times and sizes of events, in one place; EVENTS.md says what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class EventLimits:
    """Limits of one publisher. Raises InvalidRequest for invalid relations between them."""

    step_s: float = 0.1
    """Pause between two looks at etcd and at the times of folders, and the longest time for listings in between."""
    settle_s: float = 2.0
    """A folder is listed again so long after its time was first seen: a change within one tick shows no new time."""
    relist_s: float = 1.0
    """A shard is listed so often if the root's folders have no times, and no more often than that by its times."""
    retry_s: float = 5.0
    """A folder, a file or a namespace's record that could not be read is tried again after so long."""
    list_share: float = 0.25
    """Share of the time that listings may take, except those that a promise waits for."""
    folders_max: int = 4_096
    """Folders whose times are looked at in one step."""
    meta_deadline_s: float = 3.0
    lease_s: int = 5
    """The speaker's lease: another one speaks so long after it was killed."""
    heartbeat_s: float = 2.0
    """An empty batch is published after so long, so that a subscriber notices what it missed."""
    batch_blocks: int = 4_096
    """Blocks in one batch."""
    replay_batches: int = 10_000
    replay_bytes: int = 256 << 20
    """Batches kept for replay: at most so many, and so many bytes."""

    def __post_init__(self) -> None:
        if self.lease_s < 2 or self.heartbeat_s <= self.step_s or not 0 < self.list_share <= 1:
            raise InvalidRequest(f"invalid event limits: {self}")
