"""What a node has between its callers and the root: how much memory, which local disk, when puts are acknowledged."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.hints import PRIORITY_MAX
from kvstore.writes import WriteMode

MEMORY_BYTES_MIN = 16 << 20
DISK_BYTES_MIN = 64 << 20


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Checked where it is made. Raises InvalidRequest."""

    memory_bytes: int = 0
    """Shared memory for hot chunks; 0: none, and then nothing else here means anything."""
    disk_folder: str = ""
    """A folder of this node alone, on a local disk; empty: none."""
    disk_bytes: int = 0
    write: WriteMode = WriteMode.BEHIND
    """For puts that do not say."""
    root_priority_min: int = 0
    """Chunks of a lower priority (``Hints``) never reach the root (rule W4)."""
    sync_interval_s: float = 1.0
    """How often at most this node tells its peers what its memory holds."""

    def __post_init__(self) -> None:
        if self.memory_bytes and self.memory_bytes < MEMORY_BYTES_MIN:
            raise InvalidRequest(
                f"memory={self.memory_bytes}: expected 0, or at least {MEMORY_BYTES_MIN} bytes (16 MiB)"
            )
        if self.disk_folder and not self.memory_bytes:
            raise InvalidRequest("disk without memory: chunks of a local disk are read through memory; give both")
        if self.disk_folder and self.disk_bytes < DISK_BYTES_MIN:
            raise InvalidRequest(f"disk of {self.disk_bytes} bytes: expected at least {DISK_BYTES_MIN} (64 MiB)")
        if not 0 <= self.root_priority_min <= PRIORITY_MAX:
            raise InvalidRequest(f"root_priority_min={self.root_priority_min}: expected 0 to {PRIORITY_MAX}")
        if not 0.05 <= self.sync_interval_s <= 3600:
            raise InvalidRequest(f"sync_interval={self.sync_interval_s}: expected 0.05 to 3600 seconds")


NO_TIERS = TierSettings()
