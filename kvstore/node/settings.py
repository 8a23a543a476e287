"""The tiers between a node's callers and the root: memory size, local disk, write mode."""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from kvstore.brief import brief, size
from kvstore.checks import FLOAT_MAX, is_whole, number
from kvstore.encodings.codec import KeyFile
from kvstore.errors import InvalidRequest
from kvstore.format.header import check_label
from kvstore.meta.session import TTL_S
from kvstore.writes import BOUND_BYTES_MIN, Durability, WriteMode

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
        memory: int = 0,
        disk: tuple[str, int] | None = None,
        write: WriteMode | str = WriteMode.BEHIND,
        sync_interval_s: float = 1.0,
    ) -> TierSettings:
        """Makes settings from what callers give, whatever its type. Raises InvalidRequest."""
        memory_bytes = _size(memory)
        if memory_bytes is None:
            raise InvalidRequest(f"memory={brief(memory)}: expected a whole number of bytes, such as 8 << 30 for 8 GiB")
        folder, size_bytes = "", 0
        if disk is not None:
            match disk:
                case (str() | PathLike() as path, given) if _is_path(path) and (asked := _size(given)) is not None:
                    folder, size_bytes = os.fspath(path), asked
                case _:
                    raise InvalidRequest(
                        f'disk={brief(disk)}: expected a folder and bytes, such as ("/nvme/kv", 200 << 30)'
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
                f"max_bytes={brief(max_bytes)}: expected a whole number of bytes from {BOUND_BYTES_MIN} (1 MiB) to "
                f'{SIZE_END - 1}, such as 64 << 20 for 64 MiB, "auto" for a share of the disk, or None for no bound'
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


def _size(value: object) -> int | None:
    """The value as an int, if it is a whole number, of numpy too, and of 63 bits; its caller says which are right."""
    return int(value) if is_whole(value) and -SIZE_END < value < SIZE_END else None


NO_TIERS = TierSettings()


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What an operator chooses for one node. Raises InvalidRequest for a label that makes no sense."""

    durability: Durability = Durability.NONE
    tiers: TierSettings = NO_TIERS
    label: str = ""
    """The name of the roll-out that this node belongs to."""
    keys: KeyFile | None = None
    """Says whose chunks are encrypted; loaded."""
    compress: bool = False
    """Compress new chunks on the root."""
    session_ttl_s: int = TTL_S
    """A session lives so long without etcd, from 2 to 3,600 s. Then the node protects nothing until it has a new one;
    sweeps wait as long for a node that is gone. The simulation has a longer one."""

    def __post_init__(self) -> None:
        check_label(self.label)


AS_SHIPPED = NodeOptions()
"""A node of which its operator said nothing."""


def _is_path(path: str | os.PathLike[str]) -> bool:
    """True if a file may have this name: no text with a NUL, or with half a character, is one."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return bool(name) and b"\0" not in name
