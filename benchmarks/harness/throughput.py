"""The throughput harness: put and get by many processes, with fio's knobs, and fio itself in the same minute.

Each case has a number of worker processes, a block size, a transport, a cache state and a durability. fio runs with the
same block size, jobs and directory, in turns with the store. The tables give rates, ratios to fio, processor time and
latencies. Every byte is compared outside the clock.

    python -m benchmarks throughput [--workers 1,2,4] [--chunk-mib 2,32] [--path shared] [--cache cold] ...
    python -m benchmarks throughput --seconds 60 --read-share 0.7 --workers 4        a mix of puts and gets, by time
    python -m benchmarks throughput --job-file FILE.json                             cases from a file
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import kvstore
from benchmarks.harness import baselines, machine
from benchmarks.harness.baselines import KINDS, Figure, Job, Kind
from benchmarks.harness.load import DENSE, LLAMA_8B, MODELS, NAMESPACE, QWEN_3B, QWEN_7B, SMALL, Load
from benchmarks.harness.machine import GIB, MIB, Taken, percentile
from benchmarks.harness.options import Options, counts, names_of, show_progress, sizes_mib
from benchmarks.harness.paths import BULK, IN_PROCESS, PATHS, PLAIN, Served, Way, served
from benchmarks.harness.result import Cell, Plot, Result, Table
from benchmarks.harness.worker_pool import Singles, WorkerPool, worker_pool
from kvstore.core.write_mode import DurabilityName
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest

SINGLES_MAX = 64
SINGLES_BYTES_MAX = 256 * MIB
FIO_CALLS_MAX = 1 << 20
CACHED_SHARE_MAX = 0.05
"""The share of a cold read that may still be cached: read-ahead of the directory's blocks, no more."""


class Unreachable(Exception):
    """This case cannot be measured here; the text gives the reason."""


@dataclass(frozen=True)
class Case:
    """One case to measure. ``model`` "" moves opaque blocks. ``size_bytes`` by all workers in one call of each."""

    workers: int = 1
    chunk_bytes: int = 2 * MIB
    model: str = LLAMA_8B.name
    path: str = IN_PROCESS
    cache: str = "warm"
    durability: DurabilityName = "none"
    size_bytes: int = GIB
    calls: int = 1
    fio_jobs: int = 0
    seconds: float = 0.0
    """More than 0: a mix of puts and gets for so long, instead of rounds."""
    read_share: float = 0.5
    """The share of a mix's calls that are gets."""

    @property
    def jobs(self) -> int:
        """fio's jobs: as many as workers, or as one worker uses threads at once, whichever is more."""
        return self.fio_jobs or max(self.workers, Limits().width)

    @property
    def loads(self) -> list[Load]:
        """The load that each worker moves in a call."""
        layout = MODELS[self.model].layout_of(self.chunk_bytes) if self.model else None
        chunk_bytes = layout.chunk_bytes if layout else self.chunk_bytes
        chunks = max(2, self.size_bytes // self.workers // chunk_bytes)
        return [Load(chunk_bytes, chunks, layout, seed) for seed in range(1, self.workers + 1)]

    def exceeding(self, bound_bytes: int) -> Case:
        """Returns this case with so many calls a round that it moves more than ``bound_bytes``."""
        moved = sum(load.size_bytes for load in self.loads)
        return replace(self, calls=bound_bytes // moved + 1)


@dataclass
class Figures:
    """The figures, by kind ("write", "read"), one entry a round; their medians are shown."""

    chunk_bytes: int
    aggregate: dict[Kind, list[float]] = field(default_factory=lambda: {"write": [], "read": []})
    per_worker: dict[Kind, list[float]] = field(default_factory=lambda: {"write": [], "read": []})
    cpu_s_per_gib: dict[Kind, list[float]] = field(default_factory=lambda: {"write": [], "read": []})
    fio: dict[Kind, list[Figure]] = field(default_factory=lambda: {"write": [], "read": []})
    fio_each: dict[Kind, list[Figure]] = field(default_factory=lambda: {"write": [], "read": []})
    """fio with a file for each block, as we have one for each chunk."""
    fio_direct: list[float] = field(default_factory=list)
    singles: list[Singles] = field(default_factory=list)

    def median(self, kind: Kind) -> float:
        """Aggregate GiB/s."""
        return statistics.median(self.aggregate[kind])

    def ratio(self, kind: Kind, *, file_each: bool = False) -> float | None:
        """To fio: the median of the rounds' ratios. None without fio."""
        found = (self.fio_each if file_each else self.fio)[kind]
        if not found:
            return None
        pairs = zip(self.aggregate[kind], found, strict=True)
        return statistics.median(ours / theirs.gib_per_s for ours, theirs in pairs)

    def ratio_direct(self) -> float | None:
        """The ratio of reads to fio with direct=1; None if that was not measured."""
        if not self.fio_direct:
            return None
        pairs = zip(self.aggregate["read"], self.fio_direct, strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def of_fio(self, kind: Kind, name: str) -> float | None:
        """The median of one of fio's figures."""
        return statistics.median(getattr(each, name) for each in self.fio[kind]) if self.fio[kind] else None

    def single_ms(self, kind: Kind, share: float) -> float | None:
        """A percentile of calls that move one chunk, milliseconds."""
        taken = [s for each in self.singles for s in (each.put_s if kind == "write" else each.get_s)]
        return percentile(taken, share) * 1e3 if taken else None


def measure(
    case: Case, folder: Path, rounds: int, *, with_fio: bool = True, between: Callable[[], None] | None = None
) -> Figures:
    """Runs a case in ``folder``: a round to warm up, then ``rounds`` that count; fio goes first in every other one.

    ``between`` is called after each put and before the get: a test's chance to do damage.
    Raises Unreachable, WrongBytes, WorkerFailed.
    """
    if case.cache == "cold" and not baselines.can_be_cold(folder):
        raise Unreachable(f"nothing on {folder} is ever cold (a file system in memory?)")
    loads, root = case.loads, folder / "root"
    moved = sum(load.size_bytes for load in loads) * case.calls
    job = Job(
        folder / "fio",
        loads[0].chunk_bytes,
        moved,
        case.jobs,
        cold=case.cache == "cold",
        fsync=case.durability == "fsync",
    )
    figures = Figures(loads[0].chunk_bytes)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, root, ignore_errors=True)
        if with_fio:
            undo.callback(shutil.rmtree, job.folder, ignore_errors=True)
        server: Served | None = None
        way = Way(case.path, str(root), durability=case.durability)
        if case.path not in (IN_PROCESS, PLAIN):
            server = undo.enter_context(served(folder, root, case.durability))
            way = replace(way, worker=server.address)
            if reason := way.why_not():
                raise Unreachable(reason)
        owner = undo.enter_context(kvstore.open(str(root)))
        members = undo.enter_context(worker_pool(way, loads))
        for number in range(rounds + 1):
            fio_first = number % 2 == 0
            theirs = _fio_round(job, case) if with_fio and fio_first else {}
            _clear(owner, root)  # just before, as fio's files are, so that both find memory that was just freed
            ours = _round(case, members, server, number, root, between)
            if with_fio and not fio_first:
                theirs = _fio_round(job, case)
            if number:
                _count(figures, ours, theirs, loads, case.calls)
        _clear(owner, root)
        count = max(1, min(SINGLES_MAX, SINGLES_BYTES_MAX // case.workers // loads[0].chunk_bytes))
        figures.singles = members.singles(count)
    return figures


@dataclass
class MixedFigures:
    """One run of a mix: seconds of all calls by kind, aggregate GiB/s of each kind, and fio's."""

    taken_s: dict[Kind, list[float]]
    gib_per_s: dict[Kind, float]
    fio: dict[Kind, Figure]

    def row(self) -> list[Cell]:
        """The columns of a mix."""
        found: list[Cell] = [sum(map(len, self.taken_s.values()))]
        for kind in KINDS:
            theirs, taken = self.fio.get(kind), self.taken_s[kind]
            found += [self.gib_per_s[kind], theirs.gib_per_s if theirs else None]
            found += [1e3 * percentile(taken, share) if taken else None for share in (0.5, 0.99)]
        return found


def measure_mix(case: Case, folder: Path, *, with_fio: bool = True) -> MixedFigures:
    """Runs a mix in ``folder``, after fio's. Raises Unreachable, WrongBytes, WorkerFailed."""
    if case.cache == "cold":
        raise Unreachable("a mix is measured warm: a get reads what was put a moment ago")
    loads, root = case.loads, folder / "root"
    job = Job(folder / "fio", loads[0].chunk_bytes, sum(load.size_bytes for load in loads), case.jobs)
    theirs: dict[Kind, Figure] = {}
    if with_fio:
        theirs = replace(job, fsync=case.durability == "fsync").run_mix(case.seconds, case.read_share)
        job.delete()
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, root, ignore_errors=True)
        way = Way(case.path, str(root), durability=case.durability)
        if case.path not in (IN_PROCESS, PLAIN):
            way = replace(way, worker=undo.enter_context(served(folder, root, case.durability)).address)
        undo.enter_context(kvstore.open(str(root)))
        found = undo.enter_context(worker_pool(way, loads)).mix(case.seconds, case.read_share, folder)
    taken: dict[Kind, list[float]] = {
        "write": [s for each in found for s in each.put_s],
        "read": [s for each in found for s in each.get_s],
    }
    pairs = [(each, load.size_bytes / GIB / each.busy_s) for each, load in zip(found, loads, strict=True)]
    rates: dict[Kind, float] = {
        "write": sum(len(each.put_s) * rate for each, rate in pairs),
        "read": sum(len(each.get_s) * rate for each, rate in pairs),
    }
    return MixedFigures(taken, rates, theirs)


@dataclass
class _Phase:
    """One kind of call in one round: each worker's seconds, call by call, and the processor seconds of all."""

    taken: list[list[Taken]] = field(default_factory=list)
    server_cpu_s: float = 0.0


def _round(
    case: Case, members: WorkerPool, server: Served | None, number: int, root: Path, between: Callable[[], None] | None
) -> dict[Kind, _Phase]:
    """Puts, then gets all calls of a round, each verified before the next."""
    phases: dict[Kind, _Phase] = {"write": _Phase(), "read": _Phase()}
    for call in range(case.calls):
        members.prepare(number * case.calls + call)
        _add(phases["write"], members.put, server)
        if between:
            between()
        if case.calls == 1:
            _read(case, phases["read"], members, server, root)
            members.verify()
    if case.calls > 1:
        for call in range(case.calls):
            members.prepare(number * case.calls + call)
            members.forget()
            _read(case, phases["read"], members, server, root)
            members.verify()
    return phases


def _read(case: Case, phase: _Phase, members: WorkerPool, server: Served | None, root: Path) -> None:
    if case.cache == "cold":
        share = baselines.emptied(root, CACHED_SHARE_MAX)
        if share > CACHED_SHARE_MAX:
            raise Unreachable(f"{share:.0%} of what was to be read cold is still cached: the figure would be wrong")
    _add(phase, members.get, server)


def _add(phase: _Phase, work: Callable[[], list[Taken]], server: Served | None) -> None:
    before_s = server.cpu_s() if server else 0.0
    phase.taken.append(work())
    phase.server_cpu_s += server.cpu_s() - before_s if server else 0.0


def _fio_round(job: Job, case: Case) -> dict[str, Figure]:
    found = {"write": job.run("write")}
    if case.cache == "cold":
        baselines.evict(job.folder)  # fio's own dropping keeps pages that are not written back yet
    found["read"] = job.run("read")
    if case.cache == "cold":
        baselines.evict(job.folder)
        found["direct"] = replace(job, direct=True).run("read")
    job.delete()  # its pages make room for ours, as ours do for its
    if case.cache == "warm":
        each = replace(job, file_each=True)
        found["write each"], found["read each"] = each.run("write"), each.run("read")
        each.delete()
    return found


def _count(
    figures: Figures, ours: dict[Kind, _Phase], theirs: dict[str, Figure], loads: Sequence[Load], calls: int
) -> None:
    """Adds the speed as fio counts it: all bytes by the longest worker's own time."""
    moved_gib = sum(load.size_bytes for load in loads) / GIB * calls
    for kind in KINDS:
        phase = ours[kind]
        figures.aggregate[kind].append(moved_gib / sum(max(one.wall_s for one in call) for call in phase.taken))
        rates = [load.size_bytes / one.wall_s for call in phase.taken for load, one in zip(loads, call, strict=True)]
        figures.per_worker[kind].append(statistics.mean(rates) / MIB)
        cpu_s = sum(one.cpu_s for call in phase.taken for one in call) + phase.server_cpu_s
        figures.cpu_s_per_gib[kind].append(cpu_s / moved_gib)
        if theirs:
            figures.fio[kind].append(theirs[kind])
        if f"{kind} each" in theirs:
            figures.fio_each[kind].append(theirs[f"{kind} each"])
    if "direct" in theirs:
        figures.fio_direct.append(theirs["direct"].gib_per_s)


def _clear(owner: kvstore.Store, root: Path) -> None:
    for file in baselines.files(root / PLAIN):
        file.unlink()
    for namespace in owner.namespaces():
        if namespace.name == NAMESPACE:
            owner.namespace(namespace.name, namespace.layout).clear()


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

MIX = (
    *("workers", "path", "chunk MiB", "read share", "calls"),
    *("write GiB/s", "fio write GiB/s", "write p50 ms", "write p99 ms"),
    *("read GiB/s", "fio read GiB/s", "read p50 ms", "read p99 ms"),
)
MIX_NOTE = (
    "rates by the time that a worker spends in calls; a call moves a whole prompt, one of fio's a block; it ends early "
    "when less than 1 GiB is free"
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
    parser.add_argument("--seconds", type=float, metavar="S", help="a mix of puts and gets for so long, as one run")
    parser.add_argument("--read-share", type=float, metavar="P", help="of a mix: the share of gets (default: 0.5)")
    parser.add_argument(
        "--job-file", type=Path, metavar="FILE", help="a JSON object of these options, or a list of them"
    )
    parser.add_argument("--fio-jobs", type=int, metavar="N", help="default: workers, or threads of one if that is more")


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """The standard sweeps, or the cases that the arguments name."""
    size_bytes = GIB // 2 if options.quick else GIB
    if arguments is not None and arguments.size_mib:
        size_bytes = arguments.size_mib * MIB
    sweeps = [] if arguments is None else _chosen(arguments, size_bytes)
    if arguments is not None and arguments.job_file:
        sweeps = [sweep for job in read_jobs(arguments.job_file) for sweep in _chosen(job, size_bytes)]
    return _run(options, sweeps or standard(size_bytes, quick=options.quick))


def read_jobs(path: Path) -> list[argparse.Namespace]:
    """The jobs of a file: objects whose keys are this benchmark's options. Raises InvalidRequest."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from error
    parser = argparse.ArgumentParser(prog=str(path))
    add_arguments(parser)
    jobs = found if isinstance(found, list) else [found]
    if not all(isinstance(job, dict) for job in jobs):
        raise InvalidRequest(f"{path}: expected a JSON object of options, or a list of such objects")
    return [parser.parse_args([f"--{name}={_option(value)}" for name, value in job.items()]) for job in jobs]


def _option(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


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
        mixed: list[list[Cell]] = []
        for case in sweep.cases:
            with options.folder(on_disk=sweep.on_disk) as folder:
                show_progress(f"throughput: {sweep.title.lower()}, {len(done) + 1} of {len(sweep.cases)}")
                try:
                    if case.seconds:
                        keys: list[Cell] = [case.workers, case.path, case.loads[0].chunk_bytes / MIB, case.read_share]
                        mixed.append([*keys, *measure_mix(case, folder, with_fio=with_fio).row()])
                        continue
                    done.append((case, measure(case, folder, options.rounds, with_fio=with_fio)))
                except Unreachable as reason:
                    skipped.append(f"{sweep.title}: {reason}")
        if done:
            tables += tables_of(sweep, done)
        if mixed:
            tables.append(_without_empty(Table(f"{sweep.title}: a mix of puts and gets", MIX, mixed, MIX_NOTE)))
    warm, disk = machine.file_system(options.directory), machine.file_system(options.disk)
    conditions = (
        f"warm: page cache on {warm}; cold and durable: {disk}",
        f"medians of {options.rounds} rounds, in which fio and the store take turns; of ratios, the rounds' ratios",
        "aggregates as fio counts them: all bytes by the longest worker's time; all of a worker's bytes in one call",
        "p50 and p99 are of calls that move one chunk, by all workers at once",
        "fio has one file a job; where a column has `a file each`, it has one for each block, as the store does",
        "plain files: the same workers, arrays and count of threads, a file for each chunk, nothing named or verified",
    )
    return Result("throughput", HYPOTHESIS, conditions, about, tables, skipped)


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
    # A column without figures is left out.
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


def _chosen(arguments: argparse.Namespace, size_bytes: int) -> list[Sweep]:
    """Returns one sweep of every combination of the given options; none if no option was given."""
    if arguments.size_mib:
        size_bytes = arguments.size_mib * MIB
    named = {
        name: getattr(arguments, name)
        for name in (
            "workers",
            "chunk_mib",
            "model",
            "path",
            "cache",
            "durability",
            "fio_jobs",
            "exceed_mib",
            "seconds",
        )
    }
    if not any(named.values()):
        return []
    share = 0.5 if arguments.read_share is None else arguments.read_share
    if not 0 <= share <= 1:
        raise InvalidRequest(f"--read-share {share:g}: expected 0 to 1")
    base = Case(
        size_bytes=size_bytes, fio_jobs=named["fio_jobs"] or 0, seconds=arguments.seconds or 0.0, read_share=share
    )
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
