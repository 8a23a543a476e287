"""Workers that put and get at once, beside fio with the same block size, jobs and directory, in the same minute.

The table is Vineyard's (worker, write, read, aggregate), with the ratio to fio, what it cost and how long one chunk
took.  Every byte is compared outside the clock.

    python -m benchmarks workers [--workers 1,2,4] [--chunk-mib 2,32] [--model NAME] [--path shared] [--cache cold] ...
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

from benchmarks import machine
from benchmarks.case import Case, Figures, Unreachable, measure
from benchmarks.fio import KINDS
from benchmarks.models import DENSE, LLAMA_8B, MODELS, QWEN_3B, QWEN_7B, SMALL
from benchmarks.options import Options, counts, names_of, sizes_mib, told
from benchmarks.paths import BULK, IN_PROCESS, PATHS, PLAIN
from benchmarks.result import Cell, Plot, Result, Table
from benchmarks.rounds import GIB, MIB
from kvstore.writes import DurabilityName

HYPOTHESIS = (
    "put and get move chunks at 0.95 or more of what fio (psync) writes and reads with as many jobs as we use "
    "threads, every byte verified by the store; 32 workers together reach 0.95 of fio with 32 jobs"
)
BLOCKS = "opaque blocks"
DURABILITIES = get_args(DurabilityName)
WAYS = (*PATHS, PLAIN)
KEYS = {
    "workers": "workers",
    "path": "path",
    "chunk_bytes": "chunk MiB",
    "model": "model",
    "cache": "cache",
    "durability": "durability",
    "jobs": "fio jobs",
}
FIGURES = (
    "write MiB/s",
    "read MiB/s",
    "aggregate write GiB/s",
    "aggregate read GiB/s",
    "fio write GiB/s",
    "fio read GiB/s",
    "write / fio",
    "read / fio",
    "write / fio, a file each",
    "read / fio, a file each",
    "read / fio direct",
)
COSTS = (
    "CPU s/GiB write",
    "fio",
    "CPU s/GiB read",
    "fio ",
    "write p50 ms",
    "write p99 ms",
    "fio p50/p99",
    "read p50 ms",
    "read p99 ms",
    "fio p50/p99 ",
)


@dataclass(frozen=True)
class Sweep:
    """Cases that belong into one table; they are run on a disk where they are about one."""

    title: str
    cases: tuple[Case, ...]
    on_disk: bool = False
    x: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Any of these replaces the standard sweeps by the cases named: every combination of them."""
    parser.add_argument("--workers", type=counts, metavar="N,...", help="worker processes, such as 1,2,4,8,16,32")
    parser.add_argument("--chunk-mib", type=sizes_mib, metavar="N,...", help="of chunks or blocks, such as 0.0625,2,32")
    kinds = [*MODELS, BLOCKS]
    parser.add_argument("--model", type=names_of(kinds), metavar="NAME,...", help=f"whose KV: {', '.join(kinds)}")
    parser.add_argument("--path", type=names_of(WAYS), metavar="NAME,...", help=f"ways: {', '.join(WAYS)}")
    parser.add_argument("--cache", type=names_of(("warm", "cold")), metavar="NAME,...", help="warm, cold")
    parser.add_argument("--durability", type=names_of(DURABILITIES), metavar="NAME,...", help=", ".join(DURABILITIES))
    parser.add_argument("--size-mib", type=int, metavar="N", help="moved by all workers in one call of each")
    parser.add_argument("--exceed-mib", type=int, metavar="N", help="move more than this in each round, call by call")
    parser.add_argument("--fio-jobs", type=int, metavar="N", help="default: workers, or threads of one if that is more")


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """The standard sweeps, or the cases that the arguments name."""
    size_bytes = GIB // 2 if options.quick else GIB
    if arguments is not None and arguments.size_mib:
        size_bytes = arguments.size_mib * MIB
    sweeps = _chosen(arguments, size_bytes) if arguments is not None else None
    return _run(options, sweeps or standard(size_bytes, quick=options.quick))


def standard(size_bytes: int, *, quick: bool) -> list[Sweep]:
    """The sweeps of the results page."""
    base = Case(size_bytes=size_bytes)
    small = replace(base, size_bytes=size_bytes // 2)
    sizes = [2, 32] if quick else [1, 2, 8, 32]
    # 64 KiB hold less than one token of most models, so those are blocks.
    counted = (1, 2, 8, 32) if quick else (1, 2, 4, 8, 16, 32)
    blocks = [replace(small, model="", chunk_bytes=size) for size in (64 << 10, 2 * MIB)]
    models = [QWEN_7B, DENSE] if quick else [SMALL, QWEN_3B, QWEN_7B, LLAMA_8B, DENSE]
    return [
        Sweep("Workers", tuple(replace(base, workers=count) for count in counted), x="workers"),
        Sweep("Plain files, without a store", tuple(replace(base, workers=count, path=PLAIN) for count in counted)),
        Sweep("Chunk sizes", tuple(replace(base, chunk_bytes=size * MIB) for size in sizes)),
        Sweep("Blocks that an engine hashed", tuple(blocks)),
        Sweep("Blocks in plain files, without a store", tuple(replace(each, path=PLAIN) for each in blocks)),
        Sweep("One job of fio", (replace(base, fio_jobs=1),)),
        Sweep("Ways to a worker", tuple(replace(small, path=path) for path in BULK)),
        Sweep("Four workers' clients at once", tuple(replace(small, path=path, workers=4) for path in BULK)),
        Sweep("Bytes per token", tuple(replace(small, model=model.name, chunk_bytes=8 * MIB) for model in models)),
        Sweep("Cold", tuple(replace(small, cache="cold", chunk_bytes=size * MIB) for size in (2, 32)), on_disk=True),
        Sweep("Durable", tuple(replace(small, durability=name) for name in DURABILITIES), on_disk=True),
    ]


def _run(options: Options, sweeps: Iterable[Sweep]) -> Result:
    about = machine.describe()
    with_fio = machine.fio_version() is not None
    skipped = [] if with_fio else ["fio is not installed, so no ratios to it: apt-get install fio"]
    tables: list[Table] = []
    for sweep in sweeps:
        done: list[tuple[Case, Figures]] = []
        for case in sweep.cases:
            with options.folder(on_disk=sweep.on_disk) as folder:
                told(f"workers: {sweep.title.lower()}, {len(done) + 1} of {len(sweep.cases)}")
                try:
                    done.append((case, measure(case, folder, options.rounds, with_fio=with_fio)))
                except Unreachable as reason:
                    skipped.append(f"{sweep.title}: {reason}")
        if done:
            tables += tables_of(sweep, done)
    warm, disk = machine.file_system(options.directory), machine.file_system(options.disk)
    conditions = (
        f"warm: page cache on {warm}; cold and durable: {disk}",
        f"medians of {options.rounds} rounds, in which fio and the store take turns; of ratios, the rounds' ratios",
        "aggregates as fio counts them: all bytes by the longest worker's time; all of a worker's bytes in one call",
        "p50 and p99 are of calls that move one chunk, by all workers at once",
        "fio has one file a job, or, as it says, a file each, as the store has one for each chunk",
        "plain files: the same workers, arrays and count of threads, a file for each chunk, nothing named or verified",
    )
    return Result("workers", HYPOTHESIS, conditions, about, tables, skipped)


def tables_of(sweep: Sweep, done: Sequence[tuple[Case, Figures]]) -> list[Table]:
    """Throughput and cost: one row a case, with the columns in which the cases differ."""
    keyed = [_key(case, figures) for case, figures in done]
    varying = [name for name in KEYS if len({key[name] for key in keyed}) > 1]
    if not varying:
        varying = ["workers"]
    same = ", ".join(f"{KEYS[name]} {_said(keyed[0][name])}" for name in KEYS if name not in varying)
    heads = tuple(KEYS[name] for name in varying)
    speed = [
        [*(key[name] for name in varying), *_speed(figures)] for key, (_, figures) in zip(keyed, done, strict=True)
    ]
    costs = [
        [*(key[name] for name in varying), *_costs(figures)] for key, (_, figures) in zip(keyed, done, strict=True)
    ]
    plot = None
    if sweep.x:
        lines = ("aggregate write GiB/s", "aggregate read GiB/s", "fio write GiB/s", "fio read GiB/s")
        plot = Plot(KEYS[sweep.x], lines, unit="GiB/s", log_x=True)
    # A column that nobody measured says nothing.
    return [
        _without_empty(Table(sweep.title, heads + FIGURES, speed, same, plot)),
        _without_empty(Table(f"{sweep.title}: processor time and latency", heads + COSTS, costs, same)),
    ]


def _key(case: Case, figures: Figures) -> dict[str, Cell]:
    values = {one.name: getattr(case, one.name) for one in fields(case)}
    size: Cell = figures.chunk_bytes / MIB
    return {**values, "chunk_bytes": size, "model": case.model or BLOCKS, "jobs": case.jobs}


def _speed(found: Figures) -> list[Cell]:
    return [
        _median(found.per_worker["write"]),
        _median(found.per_worker["read"]),
        found.median("write"),
        found.median("read"),
        found.of_fio("write", "gib_per_s"),
        found.of_fio("read", "gib_per_s"),
        found.ratio("write"),
        found.ratio("read"),
        found.ratio("write", file_each=True),
        found.ratio("read", file_each=True),
        found.ratio_direct(),
    ]


def _costs(found: Figures) -> list[Cell]:
    row: list[Cell] = []
    for kind in KINDS:
        row += [_median(found.cpu_s_per_gib[kind]), found.of_fio(kind, "cpu_s_per_gib")]
    for kind in KINDS:
        p50, p99 = found.of_fio(kind, "p50_ms"), found.of_fio(kind, "p99_ms")
        row += [found.single_ms(kind, 0.5), found.single_ms(kind, 0.99)]
        row.append(None if p50 is None else f"{p50:.2f} / {p99:.2f}")
    return row


def _without_empty(table: Table) -> Table:
    kept = [at for at in range(len(table.columns)) if any(row[at] is not None for row in table.rows)]
    columns = tuple(table.columns[at] for at in kept)
    return replace(table, columns=columns, rows=[[row[at] for at in kept] for row in table.rows])


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _said(value: Cell) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _chosen(arguments: argparse.Namespace, size_bytes: int) -> list[Sweep] | None:
    """Returns one sweep of every combination of the given options; None if none was given."""
    named = {
        name: getattr(arguments, name)
        for name in ("workers", "chunk_mib", "model", "path", "cache", "durability", "fio_jobs", "exceed_mib")
    }
    if not any(named.values()):
        return None
    base = Case(size_bytes=size_bytes, fio_jobs=named["fio_jobs"] or 0)
    cases = [
        replace(
            base,
            workers=workers,
            chunk_bytes=chunk_bytes,
            model="" if model == BLOCKS else model,
            path=path,
            cache=cache,
            durability=durability,
        )
        for workers, chunk_bytes, model, path, cache, durability in itertools.product(
            named["workers"] or [1],
            named["chunk_mib"] or [2 * MIB],
            named["model"] or [LLAMA_8B.name],
            named["path"] or [IN_PROCESS],
            named["cache"] or ["warm"],
            named["durability"] or ["none"],
        )
    ]
    if named["exceed_mib"]:
        cases = [case.exceeding(named["exceed_mib"] * MIB) for case in cases]
    on_disk = any(case.cache == "cold" or case.durability != "none" for case in cases)
    return [Sweep("Chosen cases", tuple(cases), on_disk)]
