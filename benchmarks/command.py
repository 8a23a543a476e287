"""All benchmarks by one command: ``python -m benchmarks``, also as ``kvstore bench`` and ``make bench``.

    python -m benchmarks [all|workers|memcpy|engine|match|serving|steady|peers] [--quick] [--json] [--save FOLDER] ...

Prints each table with its ratios.  ``--save`` keeps the raw figures as JSON, from which ``benchmarks.report`` makes the
results page and its plots.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import copies, engine, matching, serving, steady, workers
from benchmarks.contents import WrongBytes
from benchmarks.crew import CrewFailed
from benchmarks.options import Options, add_options, options_of
from benchmarks.result import Result, markdown, save
from kvstore.errors import KVStoreError

PEERS = Path(__file__).parent / "peers" / "__main__.py"
PEERS_S = 3600
STOP_S = 60
QUICK = "a quick run: fewer and smaller cases"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark by its name."""

    about: str
    run: Callable[[Options, argparse.Namespace | None], Result]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None


class PeersFailed(Exception):
    """The peers' benchmark did not give figures."""


def run_peers(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """Runs as a separate program, because its contenders do."""
    if not PEERS.is_file():
        raise PeersFailed("the peers' benchmark is not in this checkout")
    command = [sys.executable, "-m", "benchmarks.peers", "--json", "--directory", str(options.directory)]
    command += ["--quick"] if options.quick else ["--rounds", str(max(5, options.rounds))]
    with ExitStack() as undo:
        # Ctrl-C is for this process alone, which ends that one.
        ran = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        undo.callback(ran.wait, STOP_S)
        undo.callback(ran.terminate)
        said, _ = ran.communicate(timeout=PEERS_S)
    try:
        return Result.from_json(json.loads(said))
    except (ValueError, KeyError, TypeError) as cause:
        raise PeersFailed(f"benchmarks.peers ended with {ran.returncode} and no figures") from cause


BENCHMARKS = {
    "workers": Benchmark("1 to 32 workers beside fio", workers.run, workers.add_arguments),
    "memcpy": Benchmark("blocks in multiples of a memory copy", copies.run, copies.add_arguments),
    "engine": Benchmark("what the store adds to an engine and saves it (emulated)", engine.run, engine.add_arguments),
    "match": Benchmark("match latency, etcd operations, memory", matching.run, matching.add_arguments),
    "serving": Benchmark("the real vLLM on a CPU, with and without stores", serving.run, serving.add_arguments),
    "steady": Benchmark("a full store beside an unlimited one", steady.run, steady.add_arguments),
    "peers": Benchmark("beside what a user would pick instead", run_peers),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all ran and every byte was right; 1: one failed; 2: wrong use."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given = ["all", *given]
    asked = _parser().parse_args(given)
    try:
        options = options_of(asked)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    names = list(BENCHMARKS) if asked.benchmark == "all" else [asked.benchmark]
    results, failed = [], False
    for number, name in enumerate(names, 1):
        began_s = time.monotonic()
        print(f"benchmarks: {name} ({number} of {len(names)}): {BENCHMARKS[name].about}", file=sys.stderr, flush=True)
        try:
            found = BENCHMARKS[name].run(options, None if asked.benchmark == "all" else asked)
        except (WrongBytes, CrewFailed, PeersFailed, KVStoreError, OSError, subprocess.SubprocessError) as error:
            print(f"benchmarks: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
            continue
        conditions = (*found.conditions, QUICK) if options.quick else found.conditions
        result = replace(found, conditions=conditions, wall_s=round(time.monotonic() - began_s, 1))
        results.append(result)
        if not asked.json:
            show(result)
            sys.stdout.flush()
        if asked.save:
            save(result, asked.save)
    if asked.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
    return int(failed)


def show(result: Result) -> None:
    """The tables, for people."""
    machine = result.machine
    quiet = "" if machine["quiet"] else f", shared with others (load {machine['load_before']} before)"
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvstore bench", description="Measures the store beside its limits.")
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, one in {"all": Benchmark("all of these, as they stand", run_peers), **BENCHMARKS}.items():
        command = commands.add_parser(name, help=one.about, description=one.about)
        add_options(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
        command.add_argument("--save", type=Path, metavar="FOLDER", help="keep the raw figures there, as JSON")
        one.add_arguments(command)
    return parser
