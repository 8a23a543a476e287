"""One case of the ``workers`` benchmark: a number of workers moving chunks of one size on one path, beside fio."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import kvstore
from benchmarks import caching
from benchmarks.crew import Crew, Singles, crew
from benchmarks.fio import KINDS, Figure, Job, Kind
from benchmarks.models import LLAMA_8B, MODELS
from benchmarks.moving import NAMESPACE, Load
from benchmarks.paths import IN_PROCESS, PLAIN, Served, Way, served
from benchmarks.rounds import GIB, MIB, Taken, percentile
from kvstore.node.settings import Limits
from kvstore.writes import DurabilityName

SINGLES_MAX = 64
SINGLES_BYTES_MAX = 256 * MIB
FIO_CALLS_MAX = 1 << 20
CACHED_SHARE_MAX = 0.05
"""The share of a cold read that may still be cached: read-ahead of the directory's blocks, no more."""


class Unreachable(Exception):
    """This case cannot be measured here; the text says why."""


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
    Raises Unreachable, WrongBytes, CrewFailed.
    """
    if case.cache == "cold" and not caching.can_be_cold(folder):
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
        members = undo.enter_context(crew(way, loads))
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
class _Phase:
    """One kind of call in one round: each worker's seconds, call by call, and the processor seconds of all."""

    taken: list[list[Taken]] = field(default_factory=list)
    server_cpu_s: float = 0.0


def _round(
    case: Case, members: Crew, server: Served | None, number: int, root: Path, between: Callable[[], None] | None
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


def _read(case: Case, phase: _Phase, members: Crew, server: Served | None, root: Path) -> None:
    if case.cache == "cold":
        share = caching.emptied(root, CACHED_SHARE_MAX)
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
        caching.evict(job.folder)  # fio's own dropping keeps pages that are not written back yet
    found["read"] = job.run("read")
    if case.cache == "cold":
        caching.evict(job.folder)
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
    for file in caching.files(root / PLAIN):
        file.unlink()
    for namespace in owner.namespaces():
        if namespace.name == NAMESPACE:
            owner.namespace(namespace.name, namespace.layout).clear()
