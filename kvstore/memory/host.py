"""How much memory there is: of the host, or what the container (the cgroup) of this process is limited to.

Separate from the arena, because it is asked for before there is one: a number that is too large must be an error where
it is given, since what does not fit is only noticed when it is written, and then the system kills somebody.
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
    """All memory of the host, or the least of what this process's cgroups are limited to."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _limits():
        with suppress(OSError, ValueError):  # not a cgroup of its own, or no limit ("max")
            there = min(there, int(path.read_text()))
    return there


def memory_most_bytes() -> int:
    """What can be given to arenas of this host or container: an eighth of it, or 1 GiB, is left to everything else."""
    there = memory_there_bytes()
    return there - min(there // SPARE_SHARE, SPARE_BYTES_MAX)


def memory_free_bytes() -> int | None:
    """What the host has now without taking it from anybody; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _limits() -> Iterator[Path]:
    """Where limits of this process may stand: its cgroup of either version, and all that this one is in."""
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
