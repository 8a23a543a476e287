"""The memory of the host, or the limit of this process's container (the cgroup).

Separate from the arena, because it is asked before there is one. A number that is too large must be an error where it
is given: otherwise nobody notices before the memory is written, and then the system kills a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SPARE_BYTES_MAX = 1 << 30
SPARE_SHARE = 8


def memory_there_bytes() -> int:
    """Returns all memory of the host, or the lowest limit of this process's cgroups."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _limits():
        with suppress(OSError, ValueError):  # not a cgroup of its own, or no limit ("max")
            there = min(there, int(path.read_text()))
    return there


def memory_most_bytes() -> int:
    """Returns what arenas of this host or container may have: it leaves an eighth, or 1 GiB, to everything else."""
    there = memory_there_bytes()
    return there - min(there // SPARE_SHARE, SPARE_BYTES_MAX)


def memory_free_bytes() -> int | None:
    """Returns what the host can give now without taking it from anybody; None if the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _limits() -> Iterator[Path]:
    """Yields the files that may limit this process: its cgroup of either version, and all cgroups around it."""
    yield CGROUPS / "memory.max"
    yield CGROUPS / "memory" / "memory.limit_in_bytes"
    with suppress(OSError, ValueError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            folder, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
            at = folder / inside.strip("/")
            while at != folder and folder in at.parents:
                yield at / name
                at = at.parent
