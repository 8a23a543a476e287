"""``python -m tests.mutants``: plants each bug of the catalogue alone, and shows that the tests of its rule fail."""

from __future__ import annotations

import argparse
import fnmatch
import re
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.building import Libraries, checks
from tests.mutants.catalogue import all_mutants
from tests.mutants.mutant import Mutant
from tests.mutants.planters import Native, Unplantable
from tests.mutants.running import ROOT, RUN_S, Outcome, Verdict, run_mutant, run_pytest


def chosen(mutants: Sequence[Mutant], patterns: Sequence[str]) -> list[Mutant]:
    """Returns the mutants whose name fits a pattern or contains it; all if there are no patterns."""
    return [
        each
        for each in mutants
        if not patterns or any(fnmatch.fnmatch(each.name, one) or one in each.name for one in patterns)
    ]


def uncovered(mutants: Sequence[Mutant]) -> list[str]:
    """Checks of the C library that no mutant turns blind."""
    blind = {each.planter.check for each in mutants if isinstance(each.planter, Native)}
    return [name for name in checks() if name not in blind]


def outdated(mutants: Sequence[Mutant]) -> list[str]:
    """Returns what no longer fits the code: functions that are gone, tests that have no file."""
    found = []
    for each in mutants:
        for module in sorted({*each.planter.modules}):
            try:
                each.planter.fits(module, _file_of(module).read_text())
            except (OSError, SyntaxError, Unplantable) as error:
                found.append(f"{each.name}: {error}")
        for test in each.tests:
            file = test.partition("::")[0]
            if file.endswith(".py") and not (ROOT / "tests" / file).exists():
                found.append(f"{each.name}: there is no {file}")
        found += [f"{each.name}: no test of {each.tests[0]} is named {word}" for word in _unnamed(each.tests)]
    return found


def _unnamed(tests: Sequence[str]) -> list[str]:
    """Returns the words of a ``-k`` expression that its file does not have: it would select nothing."""
    if "-k" not in tests:
        return []
    file, words = ROOT / "tests" / tests[0], tests[tests.index("-k") + 1]
    text = file.read_text() if file.exists() else ""
    wanted = re.sub(r"\bnot \w+|\b(and|or)\b", "", words).split()
    return [word for word in wanted if word not in text]


def _file_of(module: str) -> Path:
    path = (ROOT / "gc" if module.startswith("kvstore_gc") else ROOT) / module.replace(".", "/")
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def failing_without(mutants: Sequence[Mutant], jobs: int) -> list[str]:
    """Returns the tests that fail without a mutant: with those no mutant proves anything. Each set runs once."""
    sets: dict[tuple[str, bool], set[str]] = {}
    selected: set[tuple[tuple[str, ...], bool]] = set()
    for each in mutants:
        if "-k" in each.tests:
            selected.add((each.tests, each.native))
            continue
        for test in each.tests:
            sets.setdefault((test.partition("/")[0], each.native), set()).add(test)
    runs = [*selected, *((tuple(sorted(tests)), native) for (_, native), tests in sets.items())]

    def ran(run: tuple[tuple[str, ...], bool]) -> str:
        tests, native = run
        result = run_pytest(tests, {} if native else {"KVSTORE_NATIVE": "0"}, RUN_S * 2)
        return "" if result.code == 0 else f"{' '.join(tests)}:\n{result.output[-3000:]}"

    with ThreadPoolExecutor(jobs) as pool:
        return [wrong for wrong in pool.map(ran, runs) if wrong]


def line(outcome: Outcome) -> str:
    """Formats a row of the output."""
    return f"{outcome.verdict.value:20} {outcome.seconds:6.1f} s  {outcome.mutant.name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen mutants; returns 1 if one survived, or could not be planted."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of mutants, parts of them or patterns; all without any")
    parser.add_argument("--list", action="store_true", help="print the catalogue and end")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--check", action="store_true", help="only look whether all still fit the code: some seconds")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without mutants first")
    options = parser.parse_args(arguments)
    every = all_mutants()
    mutants = chosen(every, options.patterns)
    if not mutants:
        parser.error(f"no mutant fits {' '.join(options.patterns)}: --list prints all")
    if options.list:
        for each in mutants:
            print(f"{each.name:40} {' '.join(each.tests)}")
        return 0
    missed = [f"kvstore/native: the check {name} has no mutant" for name in uncovered(every)]
    missed += outdated(mutants)
    if missed:
        print("\n".join(missed), flush=True)
    if options.check:
        return 1 if missed else 0
    began_s = time.monotonic()
    wrong = [] if options.no_baseline else failing_without(mutants, options.jobs)
    if wrong:
        print("these fail without any mutant:\n" + "\n".join(wrong))
        return 1
    print(f"without mutants all tests pass ({time.monotonic() - began_s:.0f} s)", flush=True)
    outcomes = []
    with TemporaryDirectory(prefix="kvstore-mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        libraries = Libraries(Path(folder))
        for future in as_completed([pool.submit(run_mutant, each, libraries) for each in mutants]):
            outcomes.append(future.result())
            print(f"{len(outcomes):3}/{len(mutants)} {line(outcomes[-1])}", flush=True)
    report(outcomes, time.monotonic() - began_s)
    return 0 if not missed and all(each.verdict is Verdict.CAUGHT for each in outcomes) else 1


def report(outcomes: Sequence[Outcome], seconds: float) -> None:
    """Prints the table: slowest first, then the survivors, with the reason."""
    good = [each for each in outcomes if each.verdict is Verdict.CAUGHT]
    bad = [each for each in outcomes if each.verdict is not Verdict.CAUGHT]
    print()
    for each in sorted(good, key=lambda one: one.seconds, reverse=True):
        print(f"{line(each)}\n{'':32}by {each.why}")
    for each in bad:
        print(f"{line(each)}\n{'':32}{each.why}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = f"{seconds:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processor time"
    print(f"\n{len(good)} of {len(outcomes)} mutants caught, {len(bad)} not, in {spent}")


if __name__ == "__main__":
    sys.exit(main())
