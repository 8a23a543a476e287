"""The command: ``python -m benchmarks.peers``. See the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.options import default_directory
from benchmarks.peers.contender import ENTRIES, Entry
from benchmarks.peers.contest import Contest, play
from benchmarks.peers.environments import ENVIRONMENTS, NotReady, set_up
from benchmarks.peers.report import OURS, table_of, targets_of
from benchmarks.peers.workload import Workload
from benchmarks.result import Result, markdown
from kvstore.cli.signals import aborts, exits_on_sigterm

MIB = 1 << 20
IN_MEMORY = ("tmpfs", "ramfs")
CHUNK_MIB = (2, 32)
ROOM = 1.5
"""Room needed for what is stored, headers, file systems' blocks and repeated prefixes included."""
HYPOTHESIS = (
    "In one run on one machine kvstore, verification included, puts and gets at 3 times the speed of Vineyard's file "
    "mode or more, 20 times with long prompts of small tensors, and is as fast as LMCache's C++ backend that does not "
    "verify: 1.1 times in put, 1.0 in get, 2 as a mapped view."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: run, and kvstore's bytes were right; 1: kvstore failed, or an environment was not made; 2: wrong use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="kvstore beside its peers.")
    parser.add_argument("--setup", nargs="*", metavar="PEER", help="make the peers' environments (all) and end")
    parser.add_argument(
        "--directory",
        type=Path,
        nargs="+",
        default=[default_directory()],
        help="where all write; several: one run each",
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each contender (default: cores)")
    parser.add_argument("--size-mib", type=int, default=256, help="KV of the prompt (default: %(default)s MiB)")
    parser.add_argument("--chunk-mib", type=int, nargs="*", default=list(CHUNK_MIB), help="(default: 2 and 32)")
    parser.add_argument(
        "--long-tokens", type=int, default=16_384, help="prompt of small tensors; 0: none (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*ENTRIES], help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 64 MiB, 4,096 long tokens")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    asked = parser.parse_args(arguments)
    if asked.setup is not None:
        return _set_up(asked.setup or list(ENVIRONMENTS))
    if asked.quick:
        asked.rounds, asked.size_mib, asked.long_tokens = 3, 64, min(asked.long_tokens, 4_096)
    try:
        workloads = _workloads(asked.size_mib, asked.chunk_mib, asked.long_tokens)
        _check(asked.directory, asked.rounds, asked.threads, workloads)
    except ValueError as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    result, failed = _run(asked, workloads)
    if asked.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        for table in result.tables:
            print(f"\n{table.title}\n\n{markdown(table)}")
            if table.note:
                print(f"\n{table.note}")
    return 1 if failed else 0


def _run(asked: argparse.Namespace, workloads: Sequence[Workload]) -> tuple[Result, bool]:
    """The result, and whether kvstore itself failed."""
    about, began_s = machine.describe(), time.monotonic()
    played: list[tuple[Contest, str]] = []
    for directory in asked.directory:
        place = machine.file_system(directory)
        for workload in workloads:
            entries = _entries(asked.only, on_disk=place not in IN_MEMORY, long_prompts=workload.long_prompt)
            folder = Path(tempfile.mkdtemp(prefix="kvstore-peers-", dir=directory))
            try:
                contest = play(workload, entries, folder, threads=asked.threads, rounds=asked.rounds, report=_say)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            played.append((contest, place))
    tables = [table_of(contest, place) for contest, place in played]
    tables.append(targets_of(played))
    conditions = (
        "warm: what is read was just written, by the same process or its server; nobody drops the page cache",
        f"median of {asked.rounds} rounds after one to warm up, in turns; a ratio is the median of each round's ratio",
        "every byte of every read compared with what was put, outside the clock",
        "kvstore verifies every read; Vineyard, LMCache, Redis, Mooncake and plain files as configured do not",
        "the KV is in memory shared by all, in 4 KiB pages",
        "ratios above 1: kvstore is faster; its view is compared with the peers' get",
    )
    failures = [(name, contest) for contest, _ in played for name in contest.failures]
    skipped = [
        f"{ENTRIES[name].title}, {contest.workload.name}: {contest.failures[name]}" for name, contest in failures
    ]
    result = Result("peers", HYPOTHESIS, conditions, about, tables, skipped, time.monotonic() - began_s)
    return result, any(name == OURS for name, _ in failures)


def _entries(only: Sequence[str] | None, *, on_disk: bool, long_prompts: bool) -> list[Entry]:
    return [
        entry
        for name, entry in ENTRIES.items()
        if (not only or name in only)
        and (on_disk or not entry.only_on_disk)
        and (entry.long_prompts or not long_prompts)
    ]


def _workloads(size_mib: int, chunk_mib: Sequence[int], long_tokens: int) -> list[Workload]:
    """Raises ValueError."""
    found = []
    for each in chunk_mib:
        if not 1 <= each <= size_mib:
            raise ValueError(f"--chunk-mib {each}: expected 1 to {size_mib}, the size of the prompt")
        # Llama-3.1-8B: 32 layers, K and V of 8 heads of 128 in 16 bit; 8 tokens are a MiB.
        found.append(Workload(f"{each} MiB", 32, 2048, chunk_tokens=8 * each, chunk_count=size_mib // each))
    if long_tokens:
        if not 16 <= long_tokens <= 65_536 or long_tokens % 16:
            raise ValueError(
                f"--long-tokens {long_tokens}: expected a multiple of 16 up to 65,536, which Vineyard takes"
            )
        # 32 layers, K and V of 2 heads of 128 in 16 bit: 32 KiB a token. Chunks of 16 tokens are Vineyard's default.
        name = f"{long_tokens:,} tokens of 32 KiB"
        found.append(Workload(name, 32, 512, chunk_tokens=16, chunk_count=long_tokens // 16, long_prompt=True))
    if not found:
        raise ValueError("nothing to run: give --chunk-mib or --long-tokens")
    return found


def _check(directories: Sequence[Path], rounds: int, threads: int, workloads: Sequence[Workload]) -> None:
    """Raises ValueError."""
    if rounds < 1 or threads < 1:
        raise ValueError(f"--rounds {rounds} --threads {threads}: expected 1 or more of each")
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a folder: name one that exists")
        free_bytes = shutil.disk_usage(directory).free
        for workload in workloads:
            needed_bytes = int(ROOM * workload.size_bytes * (1 if workload.long_prompt else len(ENTRIES)))
            if free_bytes < needed_bytes:
                raise ValueError(
                    f"{directory} has {free_bytes // MIB} MiB free, {workload.name} needs {needed_bytes // MIB}: "
                    "choose another directory, or a smaller --size-mib or --long-tokens"
                )


def _set_up(names: Sequence[str]) -> int:
    failed = False
    for name in names:
        if name not in ENVIRONMENTS:
            print(f"benchmarks.peers: no peer is named {name!r}: expected {', '.join(ENVIRONMENTS)}", file=sys.stderr)
            return 2
        _say(f"{name}: setting up (torch takes minutes)" if name == "lmcache" else f"{name}: setting up")
        try:
            set_up(name)
        except NotReady as error:
            failed = True
            print(f"benchmarks.peers: {name}: {error}", file=sys.stderr)
    if shutil.which("redis-server") is None:
        print("benchmarks.peers: redis-server is not installed: apt-get install redis-server", file=sys.stderr)
        failed = True
    return 1 if failed else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with aborts(), exits_on_sigterm():
        sys.exit(main())
