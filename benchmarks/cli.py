"""All benchmarks by one command: ``python -m benchmarks``, also as ``kvstore bench`` and ``make bench``.

    python -m benchmarks list                  every benchmark, one line each
    python -m benchmarks [run] NAME [...]      one of them; --help shows its options
    python -m benchmarks all [--quick] [...]   those that make the results page

``--save FOLDER`` keeps the raw figures as JSON, from which ``benchmarks.harness.report`` makes the page and its plots.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness.load import WrongBytes
from benchmarks.harness.options import Options, add_options, options_of
from benchmarks.harness.result import Result, markdown, save
from benchmarks.harness.worker_pool import WorkerFailed
from kvstore.errors import KVStoreError

QUICK = "a quick run: fewer and smaller cases"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. Its module is imported when it runs, because some need torch or an engine."""

    about: str
    duration: str
    """As recorded in README.md, on two cores: of a full run, or of a quick one if only that was recorded."""
    module: str
    function: str = "run"
    """``run`` returns a Result. Any other is a program: it takes arguments, prints, and returns an exit code."""

    @property
    def is_program(self) -> bool:
        return self.function != "run"

    def call(self) -> Callable[..., Any]:
        """The function."""
        found: Callable[..., Any] = getattr(import_module(f"benchmarks.{self.module}"), self.function)
        return found


BENCHMARKS = {
    "throughput": Benchmark("put and get by 1 to 32 processes, beside fio", "13 min", "harness.throughput"),
    "memcpy": Benchmark("blocks in multiples of a memory copy", "30 min", "memcpy"),
    "engine": Benchmark("what the store costs an engine and saves (emulated)", "20 min", "engine"),
    "match": Benchmark("match latency, etcd operations, memory", "1.5 min", "match"),
    "serving": Benchmark("the real vLLM on a CPU, with and without stores", "-", "serving"),
    "steady": Benchmark("a full store beside an unlimited one", "1.5 min", "steady"),
    "mlperf": Benchmark("MLPerf Storage's KV cache benchmark, and its trace", "1 min", "mlperf"),
    "competitors": Benchmark(
        "beside Vineyard, LMCache, Mooncake, Redis and plain files", "4 min", "competitors.report"
    ),
    "blending": Benchmark("quality and cost of blended prefill (torch)", "3.5 min", "blending", "main"),
    "check": Benchmark("fails if a path lost a third of its speed", "-", "check", "main"),
    "durability": Benchmark("puts with each durability, on a disk", "7 min", "storage", "durability_main"),
    "encodings": Benchmark("compression and encryption of chunks", "0.5 min", "storage", "encodings_main"),
    "events": Benchmark("KV events: cost under load, memory, queries", "1 min", "events", "main"),
    "gc": Benchmark("speed and memory of the collector, and its effect on readers", "8 min", "gc", "main"),
    "gpu": Benchmark("KV into and out of a GPU (torch)", "3 min", "gpu", "main"),
    "l2": Benchmark("LMCache's own benchmark of its L2 stores", "-", "l2", "main"),
    "planning": Benchmark("what a planned batch saves, and the cost of planning", "-", "planning", "main"),
    "policies": Benchmark("eviction policies on a trace, as hit ratios", "2.5 min", "policies", "main"),
    "prefetching": Benchmark(
        "first token of a planned batch, prefetched or not", "1.5 min", "planning", "prefetching_main"
    ),
    "segments": Benchmark("finding segments, and rotating their keys", "0.5 min", "segments", "main"),
    "spreading": Benchmark("how prompts spread over workers", "0.2 min", "spreading", "main"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all ran and every byte was right; 1: one failed; 2: wrong use."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        del given[0]
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given = ["all", *given]
    if given[0] == "list":
        print_list()
        return 0
    if given[0] in BENCHMARKS and BENCHMARKS[given[0]].is_program:
        try:
            program = BENCHMARKS[given[0]].call()
        except ImportError as error:
            print(f"benchmarks: {given[0]}: {error}", file=sys.stderr)
            return 2
        return int(program(given[1:]))
    asked = _parser(given[0]).parse_args(given)
    try:
        options = options_of(asked)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return (
        run_all([asked.benchmark], options, asked) if asked.benchmark != "all" else run_all(_tables(), options, asked)
    )


def run_all(names: Sequence[str], options: Options, asked: argparse.Namespace) -> int:
    """Runs benchmarks that return results; 1 if one of them failed."""
    results, failed = [], False
    for number, name in enumerate(names, 1):
        began_s = time.monotonic()
        print(f"benchmarks: {name} ({number} of {len(names)}): {BENCHMARKS[name].about}", file=sys.stderr, flush=True)
        try:
            found: Result = BENCHMARKS[name].call()(options, None if asked.benchmark == "all" else asked)
        except (WrongBytes, WorkerFailed, KVStoreError, OSError, ImportError, subprocess.SubprocessError) as error:
            print(f"benchmarks: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
            continue
        conditions = (*found.conditions, QUICK) if options.quick else found.conditions
        result = replace(found, conditions=conditions, wall_s=round(time.monotonic() - began_s, 1))
        results.append(result)
        if not asked.json:
            show(result)
        if asked.save:
            save(result, asked.save)
    if asked.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
    return int(failed)


def show(result: Result) -> None:
    """The tables, for people."""
    machine = result.machine
    quiet = "" if machine["quiet"] else f", shared with other work (load {machine['load_before']} before)"
    print(f"\n{result.benchmark}: {machine['cores']} cores, {machine['cpu']}, Linux {machine['kernel']}{quiet}")
    for line in result.conditions:
        print(f"  {line}")
    for table in result.tables:
        print(f"\n{table.title}\n\n{markdown(table)}")
        if table.note:
            print(f"\n{table.note}")
    for line in result.skipped:
        print(f"\nnot measured: {line}")
    print(flush=True)


def print_list() -> None:
    """One line for each benchmark."""
    for name, one in BENCHMARKS.items():
        print(f"{name:<14}{one.about:<64}{one.duration:>7}")


def _tables() -> list[str]:
    return [name for name, one in BENCHMARKS.items() if not one.is_program]


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Only the chosen benchmark is imported for its options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    commands.add_parser("list", help="every benchmark, one line each")
    for name in ("all", *BENCHMARKS):
        about = BENCHMARKS[name].about if name in BENCHMARKS else "those that make the results page"
        command = commands.add_parser(name, help=about, description=about)
        add_options(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
        command.add_argument("--save", type=Path, metavar="FOLDER", help="keep the raw figures there, as JSON")
        if name == chosen and name in BENCHMARKS:
            import_module(f"benchmarks.{BENCHMARKS[name].module}").add_arguments(command)
    return parser
