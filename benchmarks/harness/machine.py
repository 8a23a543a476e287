"""The machine of a measurement, which is named with every figure; and time, processor time and percentiles.

Other load disturbs a machine for seconds at a time. So contenders are measured in turns.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvstore import native

GIB = 1 << 30
SHM = Path("/dev/shm")
SHARED_LOAD = 0.5
"""Runnable processes, averaged over a minute before the run, from which on the run counts as disturbed."""


def describe() -> dict[str, Any]:
    """The machine, the commit, and how busy others kept it just before."""
    load = os.getloadavg()[0]
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "fio": fio_version() or "not installed",
        "native": _native(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "load_before": round(load, 2),
        "quiet": load < SHARED_LOAD,
    }


def commit() -> str:
    """The checked-out commit, with ``+changes`` where files differ from it; unknown outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = _output("git", "-C", str(here), "rev-parse", "--short=10", "HEAD")
        changed = _output("git", "-C", str(here.parent), "status", "--porcelain", "--", "kvstore", "benchmarks")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    # The results themselves change while they are made.
    code = [line for line in changed.splitlines() if "benchmarks/results" not in line and "RESULTS.md" not in line]
    return head + ("+changes" if code else "")


def fio_version() -> str | None:
    """The output of ``fio --version``; None if it is not installed."""
    if shutil.which("fio") is None:
        return None
    try:
        return _output("fio", "--version").removeprefix("fio-")
    except (OSError, subprocess.SubprocessError):
        return None


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, as the kernel's mount table has it."""
    best, found = Path("/"), "unknown"
    folder = folder.resolve()
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        mount = Path(place.encode().decode("unicode_escape"))
        if (folder == mount or mount in folder.parents) and len(mount.parts) >= len(best.parts):
            best, found = mount, kind
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _native() -> str:
    """True if the store's native data path is in use."""
    return "in use" if native.is_available() else f"not in use: {native.why_not()}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


T = TypeVar("T")
MIB = 1 << 20


@dataclass(frozen=True)
class Taken:
    """Seconds on the clock, and of all processor cores together in this process."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Taken:
    """The cost of one call."""
    cpu_s, began_s = time.process_time(), time.perf_counter()
    work()
    wall_s = time.perf_counter() - began_s
    return Taken(wall_s, time.process_time() - cpu_s)


def in_turns(works: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1) -> list[dict[str, T]]:
    """Calls each work once a round, in alternating order; each returns its figure. The first rounds are not counted."""
    counted = []
    for number in range(rounds + warm_up):
        names = list(works)[:: 1 if number % 2 else -1]
        found = {name: works[name]() for name in names}
        if number >= warm_up:
            counted.append(found)
    return counted


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
