"""fio on a directory: what the file system gives a plain program, in the same minute."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.machine import GIB

Kind = Literal["write", "read"]
KINDS: tuple[Kind, Kind] = ("write", "read")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Job:
    """One run: ``jobs`` processes, each with a file of its own, or one for each block, of ``block_bytes``."""

    folder: Path
    block_bytes: int
    size_bytes: int
    jobs: int
    direct: bool = False
    cold: bool = False
    fsync: bool = False
    file_each: bool = False

    def run(self, kind: Kind) -> Figure:
        """Writes anew (whatever was there is deleted just before), or reads what was written."""
        options = [f"--rw={kind}"]
        if kind == "write":
            self.folder.mkdir(exist_ok=True)
            self.delete()
            options += ["--fdatasync=1"] if self.fsync else []
        return _figure(self._run(options), kind)

    def run_mix(self, seconds: float, read_share: float) -> dict[Kind, Figure]:
        """Reads and writes random blocks for some time, ``read_share`` of them reads."""
        self.folder.mkdir(exist_ok=True)
        options = ["--rw=randrw", f"--rwmixread={round(100 * read_share)}", "--time_based", f"--runtime={seconds:g}"]
        found = self._run(options)
        return {kind: _figure(found, kind) for kind in KINDS if found[kind]["io_bytes"]}

    def _run(self, options: list[str]) -> dict[str, Any]:
        blocks = max(1, self.size_bytes // self.jobs // self.block_bytes)
        command = [
            "fio",
            "--name=j",
            f"--directory={self.folder}",
            "--ioengine=psync",
            f"--bs={self.block_bytes}",
            f"--size={blocks * self.block_bytes}",
            f"--numjobs={self.jobs}",
            "--group_reporting",
            "--output-format=json",
            "--fallocate=none",
            f"--direct={int(self.direct)}",
            f"--invalidate={int(self.cold)}",
        ]
        if self.file_each:
            command += [f"--nrfiles={blocks}", "--openfiles=1", "--file_service_type=sequential"]
        ran = subprocess.run(command + options, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        # Warnings may stand before the JSON.
        found: dict[str, Any] = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]
        return found

    def delete(self) -> None:
        """Deletes fio's files."""
        for old in self.folder.iterdir():
            old.unlink()


@dataclass(frozen=True)
class Figure:
    """Aggregate GiB/s (all bytes by the longest job's time), processor seconds per GiB, milliseconds per block."""

    gib_per_s: float
    cpu_s_per_gib: float
    p50_ms: float
    p99_ms: float


def _figure(found: dict[str, Any], kind: Kind) -> Figure:
    moved = found[kind]
    cpu_s = (found["usr_cpu"] + found["sys_cpu"]) / 100 * found["job_runtime"] / 1e3
    shares = moved["clat_ns"].get("percentile", {})
    return Figure(
        moved["bw_bytes"] / GIB,
        cpu_s / (moved["io_bytes"] / GIB),
        shares.get("50.000000", 0) / 1e6,
        shares.get("99.000000", 0) / 1e6,
    )
