"""Puts with each durability, in turns and on a disk: what a put that survives a power cut costs.

Hypothesis: ``everysec`` writes 0.9 or more of what ``none`` does, since one ``syncfs`` a second is for all and no put
waits for it; with ``fsync`` each put waits for the device.  A turn has a root of its own, and begins when all that was
written before is on the device.  The last prompt of each turn is read again and compared.

    python -m benchmarks.durability [--rates-mib 100 0] [--seconds 8] [--rounds 5] [--disk FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

import kvstore
from benchmarks import machine
from benchmarks.contents import WrongBytes
from benchmarks.models import LLAMA_8B
from benchmarks.rounds import MIB, in_turns, percentile
from kvstore.writes import Durability

LAYOUT = LLAMA_8B.layout_of(2 * MIB)
PROMPT_CHUNKS = 8
NONE = Durability.NONE.value


@dataclass(frozen=True)
class Row:
    """One durability at one rate: medians of the rounds, and of their ratios to ``none`` in the same round."""

    asked_mib_s: float
    """0: as fast as it goes."""
    durability: str
    mib_s: float
    ratio: float
    ratio_min: float
    ratio_max: float
    put_p50_ms: float
    put_p99_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; 0 where every byte was right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durability", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rates-mib", type=float, nargs="+", default=[100, 0], help="0: as fast as it goes")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: %(default)s)")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="default: %(default)s")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or not given.seconds > 0 or not given.disk.is_dir():
        print("benchmarks.durability: give 1 round or more, some seconds, and a folder that exists", file=sys.stderr)
        return 2
    rows = [row for rate in given.rates_mib for row in measured(given.disk, rate * MIB, given.seconds, given.rounds)]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    print(f"{machine.file_system(given.disk)}, puts of {PROMPT_CHUNKS * LAYOUT.chunk_bytes / MIB:g} MiB")
    print("| asked MiB/s | durability | MiB/s | of none | its range | put p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        asked = f"{row.asked_mib_s:g}" if row.asked_mib_s else "all it can"
        print(
            f"| {asked} | {row.durability} | {row.mib_s:.0f} | {row.ratio:.3f} | {row.ratio_min:.2f} to "
            f"{row.ratio_max:.2f} | {row.put_p50_ms:.1f} | {row.put_p99_ms:.1f} |"
        )
    return 0


def measured(disk: Path, rate: float, seconds: float, rounds: int) -> list[Row]:
    """Runs all durabilities in turns, at ``rate`` bytes a second (0: as fast as it goes). Raises WrongBytes."""
    taken: dict[str, list[float]] = {each.value: [] for each in Durability}
    works = {name: partial(turn, disk, name, rate, seconds, taken[name]) for name in taken}
    found = in_turns(works, rounds)
    rows = []
    for name, puts_s in taken.items():
        ratios = [figures[name] / figures[NONE] for figures in found]
        speed = statistics.median(figures[name] for figures in found) / MIB
        spread = statistics.median(ratios), min(ratios), max(ratios)
        rows.append(
            Row(rate / MIB, name, speed, *spread, percentile(puts_s, 0.5) * 1e3, percentile(puts_s, 0.99) * 1e3)
        )
    return rows


def turn(disk: Path, durability: str, rate: float, seconds: float, puts_s: list[float]) -> float:
    """Puts prompts for ``seconds``; returns the bytes a second that were acknowledged. Raises WrongBytes."""
    tokens = np.arange(PROMPT_CHUNKS * LAYOUT.chunk_tokens, dtype=np.uint32)
    words = np.random.default_rng(1).integers(0, 1 << 16, LAYOUT.shape(len(tokens)), np.uint16)
    kv = words.view(LAYOUT.numpy_dtype)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=disk) as folder:
        os.sync()
        with kvstore.open(folder, durability=Durability.of(durability), max_bytes=None) as store:
            cache = store.namespace("bench", LAYOUT)
            written, began_s = 0, time.monotonic()
            while (now_s := time.monotonic()) < began_s + seconds:
                if rate and written > rate * (now_s - began_s):
                    time.sleep(written / rate - (now_s - began_s))
                    continue
                tokens[0] += 1
                words[0, 0, :, 0, 0] += 1
                before_s = time.monotonic()
                cache.put(tokens, kv)
                puts_s.append(time.monotonic() - before_s)
                written += kv.nbytes
            speed = written / (time.monotonic() - began_s)
            count, read = cache.get(tokens)
            if count != len(tokens) or not np.array_equal(read.view(np.uint16), words):
                raise WrongBytes(f"{durability}: what was put last reads otherwise, or not at all")
    os.sync()
    return speed


if __name__ == "__main__":
    sys.exit(main())
