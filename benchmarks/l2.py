"""LMCache's own benchmark of its L2 stores, with verification: ours beside its ``fs`` and ``fs_native``.

    PYTHONPATH=. .cache/engines/lmcache/bin/python -m benchmarks.l2 [--directory DIR] [--json]

Hypothesis: stores faster than ``fs_native``, which is C++ and checks nothing; loads about as fast, verified.
Baseline: LMCache's two, in the same directory, in alternating runs of the same minute; the figure is the median of the
runs' medians.  Cache state: warm, what was stored is loaded from memory.  Needs the environment that
.ci/engines.sh makes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

RUN_S = 300.0
CHECKOUT = Path(__file__).parents[1]
VERIFIED = "data verified OK"


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one store at one object size: MiB/s, and keys/s of look-ups; medians over the runs."""

    store: str
    size_kib: int
    store_mib_s: float
    load_mib_s: float
    lookup_keys_s: float


def specs(directory: Path) -> dict[str, dict[str, object]]:
    """LMCache's specification of each store."""
    plugin = {"type": "plugin", "module_path": "kvstore.connectors.lmcache", "class_name": "KVStoreL2Adapter"}
    return {
        "fs": {"type": "fs", "base_path": str(directory / "fs")},
        "fs_native": {"type": "fs_native", "base_path": str(directory / "fs_native")},
        "kvstore": {**plugin, "adapter_params": {"root": str(directory / "kvstore")}},
    }


def run(store: str, size_kib: int, keys: int, rounds: int, in_flight: int, directory: Path) -> Figures:
    """One run in a directory of its own, every byte verified. Raises RuntimeError where it failed."""
    with tempfile.TemporaryDirectory(prefix="kvstore-l2-", dir=directory) as scratch:
        spec = specs(Path(scratch))[store]
        (Path(scratch) / store).mkdir()
        command = [
            str(Path(sys.executable).parent / "lmcache"),
            "bench",
            "l2",
            "--l2-adapter",
            json.dumps(spec),
            "--no-skip-verify",
            "--format",
            "json",
            "--output",
            f"{scratch}/figures.json",
            "--lookup-max-hit-rate",
            "1.0",
            "--data-size-kb",
            str(size_kib),
            "--num-keys",
            str(keys),
            "--rounds",
            str(rounds),
            "--in-flight",
            str(in_flight),
        ]
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONPATH": str(CHECKOUT)}
        done = subprocess.run(
            command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=RUN_S, check=False
        )
        said = done.stdout + done.stderr
        if done.returncode or VERIFIED not in said:
            raise RuntimeError(f"lmcache bench l2 with {store} ended with {done.returncode}:\n{said[-4000:]}")
        metrics = json.loads((Path(scratch) / "figures.json").read_text())["metrics"]
        by_name = {
            each["operation"]: each for each in metrics.values() if isinstance(each, dict) and "operation" in each
        }
        for name, each in by_name.items():
            if each["total_success"] != each["total_keys"]:
                raise RuntimeError(f"{store}: {name} had {each['total_success']} of {each['total_keys']} keys")
        mib = in_flight * keys * size_kib / 1024
        seconds = {name: each["duration_p50_ms"] / 1000 for name, each in by_name.items()}
        return Figures(
            store, size_kib, mib / seconds["Store"], mib / seconds["Load"], in_flight * keys / seconds["Lookup"]
        )


def table(
    sizes_kib: Sequence[int], keys: int, rounds: int, in_flight: int, repeats: int, directory: Path
) -> list[Figures]:
    """Every store at every size, the stores taking turns."""
    rows = []
    for size_kib in sizes_kib:
        runs: dict[str, list[Figures]] = {store: [] for store in specs(directory)}
        for _ in range(repeats):
            for store, each in runs.items():
                each.append(run(store, size_kib, keys, rounds, in_flight, directory))
        rows += [
            Figures(
                store,
                size_kib,
                median(one.store_mib_s for one in each),
                median(one.load_mib_s for one in each),
                median(one.lookup_keys_s for one in each),
            )
            for store, each in runs.items()
        ]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[256, 2048, 32768])
    parser.add_argument("--mib", type=int, default=128, help="bytes of one round in MiB (default: 128)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each store (default: 3)")
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    needed = 4 * options.mib * (options.rounds + 1) << 20
    if shutil.disk_usage(options.directory).free < needed:
        parser.error(f"{options.directory} has less than {needed >> 20} MiB free: give another --directory")
    rows: list[Figures] = []
    for size_kib in options.sizes_kib:
        keys = max(1, options.mib * 1024 // size_kib // options.in_flight)
        rows += table([size_kib], keys, options.rounds, options.in_flight, options.repeats, options.directory)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    print(f"{'KiB':>6} {'store':10} {'store MiB/s':>12} {'load MiB/s':>12} {'look-up keys/s':>15}  beside fs_native")
    for row in rows:
        native = next(each for each in rows if each.store == "fs_native" and each.size_kib == row.size_kib)
        ratio = f"{row.store_mib_s / native.store_mib_s:.2f} stored, {row.load_mib_s / native.load_mib_s:.2f} loaded"
        print(
            f"{row.size_kib:6} {row.store:10} {row.store_mib_s:12.0f} {row.load_mib_s:12.0f} "
            f"{row.lookup_keys_s:15.0f}  {ratio}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
