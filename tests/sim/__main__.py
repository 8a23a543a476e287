"""``python -m tests.sim SEED`` replays one run; ``python -m tests.sim --seeds N`` searches and reports."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.mutants import HOMES, first_to_find_mutant
from tests.sim.profiles import BY_NAME
from tests.sim.run import first_to_find, run, run_many

PROGRESS = 500

MUST_HAPPEN = (
    "chunks read",
    "claims of I1",
    "claims of I2",
    "fences lifted",
    "late effects landed",
    "chunks kept: pinned",
    "chunks kept: published anew",
    "metadata calls failed",
    "mishap: cut_watches",
    "mishap: damage",
    "mishap: expire",
    "mishap: kill",
    "mishap: restore",
    "mishap: stop",
    "node: announcements",
    "node: quarantine_restored",
    "node: sessions_lost",
    "pauses until condemned",
    "pauses until take",
    "publications reaped",
)
"""What a search must have met to be one; the numbers are in the summary."""


def main() -> int:
    """Returns the exit status: 1 for a violation, or where something important never happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="replay this one")
    parser.add_argument("--trace", action="store_true", help="print every call of the replayed run")
    parser.add_argument("--profile", choices=sorted(BY_NAME), help="not in the seed's own")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to search")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--until-found", action="store_true", help="end at the first violation")
    parser.add_argument("--mutants", nargs="*", metavar="NAME", help="the first seed that shows each mutant")
    asked = parser.parse_args()
    if asked.mutants is not None:
        return search_mutants(asked.mutants or sorted(HOMES), asked.seeds)
    if asked.seed is None and asked.until_found:
        found = first_to_find(range(asked.seeds), BY_NAME[asked.profile] if asked.profile else None)
        print(f"seed {found.seed} ({found.profile}): {found.violation}" if found else "no violation")
        return int(found is not None)
    if asked.seed is None:
        return search(asked.first, asked.seeds, asked.workers, asked.profile)
    profile = BY_NAME[asked.profile] if asked.profile else None
    outcome = run(asked.seed, profile=profile, trace=asked.trace)
    print(*outcome.log, sep="\n", end="\n" if outcome.log else "")
    print(f"seed {outcome.seed} ({outcome.profile}): {outcome.steps} steps, digest {outcome.digest:08x}")
    print(outcome.violation or "no violation")
    return int(outcome.violation is not None)


def search_mutants(names: list[str], seeds_count: int) -> int:
    """Prints the first seed that shows each mutant; returns 1 if none shows one."""
    lost = []
    for name in names:
        found = first_to_find_mutant(name, seeds_count)
        print(f"{name:40} {found or '**not found**'}", flush=True)
        lost += [] if found else [name]
    return int(bool(lost))


def search(first: int, count: int, workers: int, profile: str | None) -> int:
    """Runs many seeds and prints a summary; see ``main``."""
    began_s, done, steps, found = time.monotonic(), 0, 0, 0
    counts: Counter[str] = Counter()
    for outcome in run_many(range(first, first + count), workers, profile):
        done += 1
        steps += outcome.steps
        counts += outcome.counts
        counts[f"profile: {outcome.profile}"] += 1
        if outcome.violation is not None:
            found += 1
            print(f"\nseed {outcome.seed} ({outcome.profile}): {outcome.violation}")
            where = f" --profile {profile}" if profile else ""
            print(f"  replay: .venv/bin/python -m tests.sim {outcome.seed}{where} --trace", flush=True)
        if done % PROGRESS == 0 or done == count:
            rate = done / (time.monotonic() - began_s)
            print(f"  {done}/{count} seeds, {rate:.0f}/s, {found} violations", file=sys.stderr, flush=True)
    assert done == count, f"only {done} of {count} seeds were run"
    print(f"\n{done} seeds, {steps} steps, {time.monotonic() - began_s:.0f} s")
    for what, times in sorted(counts.items()):
        print(f"  {times:10d}  {what}")
    missing = [what for what in MUST_HAPPEN if not counts[what]] if profile is None else []
    if missing and count >= 1000:
        print(f"never happened, so nothing was shown about it: {', '.join(missing)}")
    print(f"{found} violations")
    return int(bool(found or (missing and count >= 1000)))


if __name__ == "__main__":
    sys.exit(main())
