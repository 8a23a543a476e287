"""The tiers between a node's callers and the root: memory size, local disk, write mode."""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from kvstore.codec.codec import KeyFile
from kvstore.core.executor import QUEUE_MAX, STALL_S, WIDTH
from kvstore.core.recency import QUANTUM_S
from kvstore.core.validate import FLOAT_MAX, brief, check_limits, is_whole, number, parse_size, size
from kvstore.core.write_mode import BOUND_BYTES_MIN, Durability, WriteMode
from kvstore.errors import InvalidRequest
from kvstore.meta.session import TTL_S
from kvstore.meta.store import TIMEOUT_S_MAX

# Every limit and timing of a node in one place, with their relations checked once.


IO_THREADS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a node. Raises InvalidRequest for invalid values or combinations."""

    match_deadline_s: float = 5.0
    """A match that takes longer is a miss."""
    read_deadline_s: float = 15.0
    """A read that takes longer is a miss; nothing writes into its memory afterwards."""
    write_deadline_s: float = 30.0
    """A put that takes longer is shed: it raises Unavailable, and what was published stays."""
    meta_deadline_s: float = 5.0
    """Deadline of a call to etcd."""
    stall_s: float = STALL_S
    """The root counts as hung once every thread has been in one file-system call for this long; calls then fail."""
    io_threads: int = 16
    """Threads that make file-system calls."""
    width: int = WIDTH
    """Threads that one request may use at a time. One more than cores: while one waits for the GIL, the others copy."""
    queue_max: int = QUEUE_MAX
    """Requests that may wait for a thread; more are refused with Overloaded."""
    known_max: int = 1 << 20
    """Addresses remembered as present (a power of two, rounded down), 12 bytes each, allocated at the start."""
    chains_bytes_max: int = 32 << 20
    """Memory for recent prompts and their addresses: a prompt that begins like one hashes only its new tokens."""
    quantum_s: int = QUANTUM_S
    """Recency is renewed once per quantum; a remembered presence is trusted for one to two quanta."""
    hold_max_s: float = 300.0
    """A hold ends by itself after this time."""
    hold_linger_s: float = 10.0
    """An announced hold is named for this long after its end as well. Otherwise the next sweep of the same round could
    delete the parents of chunks that the previous sweep skipped."""
    held_names_max: int = 8192
    """The most chunks that one announcement names, 175 KB in etcd; beyond it an announcement ends before a sweep."""
    announce_s: float = 0.05
    """At most one announcement to collectors in this time; they ask for fewer if there are many nodes."""
    announce_lag_max_s: float = 330.0
    """A node that has not announced a sweep for this long stops its keepalives, so that collectors go on."""
    follow_s: float = 0.25
    """Time that the follower of garbage collection waits for events before it checks whether an announcement is due."""
    gap_check_s: float = 10.0
    """After this long without an event, the watch is checked against etcd."""
    holds_max: int = 100_000
    """Limit on live holds."""
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
    behind_after_s: float = 0.05
    """How long a chunk waits before it is written: acknowledging its put needs the cores first."""
    behind_give_up_s: float = 60.0
    """A chunk that could not be written to the root for this long is lost."""
    flush_s: float = 10.0
    """Limit on the time that a closing node spends writing chunks that the root lacks."""
    operations_max: int = 32
    """Operations (prefetch, clear) that may be unfinished; more are refused with Overloaded."""
    prefetch_deadline_s: float = 600.0
    """A prefetch that takes longer fails; what it has brought stays."""
    clear_answer_s: float = 15.0
    """How long a clear waits for other nodes to drop the chunks: a node that hangs never answers."""
    clear_deadline_s: float = 600.0
    """A clear of a namespace that takes longer fails; what it has deleted stays deleted."""
    open_files_max: int = 256
    """Files that one layer-by-layer read keeps open."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.io_threads > IO_THREADS_MAX:
            raise InvalidRequest(f"io_threads={self.io_threads}: expected at most {IO_THREADS_MAX} threads")
        if self.behind_share > 1:
            raise InvalidRequest(f"behind_share={self.behind_share}: expected a share of memory, at most 1")
        if self.meta_deadline_s > TIMEOUT_S_MAX:
            raise InvalidRequest(f"meta_deadline_s={self.meta_deadline_s}: expected at most {TIMEOUT_S_MAX:g}")
        if self.width > self.io_threads:
            raise InvalidRequest(f"width={self.width} is over io_threads={self.io_threads}: a request cannot use more")
        if self.announce_lag_max_s <= self.hold_max_s + self.announce_s:
            raise InvalidRequest(
                f"announce_lag_max_s={self.announce_lag_max_s} is not over the sum of hold_max_s={self.hold_max_s} and "
                f"announce_s={self.announce_s}: "
                "a node that holds too much to name it announces once those holds have ended"
            )
        if self.hold_max_s < self.read_deadline_s:
            raise InvalidRequest(
                f"hold_max_s={self.hold_max_s} is under read_deadline_s={self.read_deadline_s}: "
                "a hold must outlast the read it protects"
            )


MEMORY_BYTES_MIN = 16 << 20
DISK_BYTES_MIN = 64 << 20
TTL_S_MIN = 1.0
SYNC_S_MIN = 0.05
SYNC_S_MAX = 3600.0
SIZE_END = 1 << 63


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Checked when it is made. Raises InvalidRequest."""

    memory_bytes: int = 0
    """Shared memory for hot chunks, in bytes; 0 means none, and then the other settings have no meaning."""
    disk_folder: str = ""
    """A folder of this node alone, on a local disk; empty for none."""
    disk_bytes: int = 0
    write: WriteMode = WriteMode.BEHIND
    """The write mode of puts that name none."""
    sync_interval_s: float = 1.0
    """Shortest time between two reports of this node's memory to its peers."""

    def __post_init__(self) -> None:
        if self.memory_bytes and self.memory_bytes < MEMORY_BYTES_MIN:
            raise InvalidRequest(f"memory={size(self.memory_bytes)}: expected 0, or at least {size(MEMORY_BYTES_MIN)}")
        if self.disk_folder and not self.memory_bytes:
            raise InvalidRequest("disk without memory: chunks of a local disk are read through memory; give both")
        if self.disk_folder and self.disk_bytes < DISK_BYTES_MIN:
            raise InvalidRequest(f"disk of {size(self.disk_bytes)}: expected at least {size(DISK_BYTES_MIN)}")
        if not SYNC_S_MIN <= self.sync_interval_s <= SYNC_S_MAX:
            raise InvalidRequest(
                f"sync_interval={self.sync_interval_s}: expected {SYNC_S_MIN:g} to {SYNC_S_MAX:g} seconds"
            )

    @classmethod
    def of(
        cls,
        memory: int | str = 0,
        disk: tuple[str, int | str] | None = None,
        write: WriteMode | str = WriteMode.BEHIND,
        sync_interval_s: float = 1.0,
    ) -> TierSettings:
        """Makes settings from what callers give, whatever its type. Raises InvalidRequest."""
        memory_bytes = _size(memory)
        if memory_bytes is None:
            raise InvalidRequest(f'memory={brief(memory)}: expected bytes, such as 8 << 30 or "8GiB"')
        folder, size_bytes = "", 0
        if disk is not None:
            match disk:
                case (str() | PathLike() as path, given) if _is_path(path) and (asked := _size(given)) is not None:
                    folder, size_bytes = os.fspath(path), asked
                case _:
                    raise InvalidRequest(
                        f'disk={brief(disk)}: expected a folder and bytes, such as ("/nvme/kv", "200GiB")'
                    )
        return cls(memory_bytes, folder, size_bytes, WriteMode.of(write), sync_interval_s)


@dataclass(frozen=True, slots=True)
class AskedBound:
    """The bound that a caller asks for. ``max_bytes`` "auto" is the root's default, where a root has one."""

    max_bytes: int | Literal["auto"] | None = None
    ttl_s: float | None = None

    @classmethod
    def of(cls, max_bytes: int | str | None, ttl: float | None) -> AskedBound:
        """Makes it from what callers give, whatever its type. Raises InvalidRequest."""
        chosen: int | Literal["auto"] | None = None
        if isinstance(max_bytes, str) and max_bytes == "auto":
            chosen = "auto"
        elif (size_bytes := _size(max_bytes)) is not None and size_bytes >= BOUND_BYTES_MIN:
            chosen = size_bytes
        elif max_bytes is not None:
            raise InvalidRequest(
                f"max_bytes={brief(max_bytes)}: expected bytes from {BOUND_BYTES_MIN} (1 MiB) to {SIZE_END - 1}, as a "
                'number or text such as "64MiB", "auto" for a share of the disk, or None for no bound'
            )
        if ttl is None:
            return cls(chosen)
        ttl_s = number(ttl)
        if ttl_s is None or not TTL_S_MIN <= ttl_s <= FLOAT_MAX:
            raise InvalidRequest(f"ttl={brief(ttl)}: expected a number of seconds, at least {TTL_S_MIN:g}, or None")
        return cls(chosen, float(ttl_s))

    @property
    def is_explicit(self) -> bool:
        """True if the caller named a limit: then there must be one."""
        return self.ttl_s is not None or self.max_bytes not in ("auto", None)


NOT_BOUNDED = AskedBound()


def _size(given: object) -> int | None:
    """Bytes as a whole number, of numpy too, or as text such as ``8GiB``; None for others, and over 63 bits."""
    value = parse_size(given)
    return int(value) if is_whole(value) and -SIZE_END < value < SIZE_END else None


NO_TIERS = TierSettings()


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The settings of one node."""

    durability: Durability = Durability.NONE
    tiers: TierSettings = NO_TIERS
    keys: KeyFile | None = None
    """Says whose chunks are encrypted; loaded."""
    compress: bool = False
    """Compress new chunks on the root."""
    session_ttl_s: int = TTL_S
    """A session lives so long without etcd, from 2 to 3,600 s. Then the node protects nothing until it has a new one;
    sweeps wait as long for a node that is gone. The simulation has a longer one."""


AS_SHIPPED = NodeOptions()
"""The options of a node whose operator set none."""


def _is_path(path: str | os.PathLike[str]) -> bool:
    """True if a file may have this name: no text with a NUL, or with half a character, is one."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return bool(name) and b"\0" not in name
