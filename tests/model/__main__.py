"""``python -m tests.model [--quick] [--trace] [name ...]`` searches worlds (``hold``), mutations (``hold/no_grace``).

Without names all of them, which takes a quarter of an hour on two cores. Prints a line each; the exit code is 1 if one
is not as expected.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from tests.model import host
from tests.model.check import Checked, check
from tests.model.configs import CONFIGS, QUICK
from tests.model.mutations import MUTATIONS


def main() -> int:
    """Runs the worlds and mutations named."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Checks the protocol's model.")
    parser.add_argument("names", nargs="*", help="worlds and mutations; all of them by default")
    parser.add_argument("--quick", action="store_true", help="all mutations, and worlds that take seconds")
    parser.add_argument("--trace", action="store_true", help="print counterexamples")
    arguments = parser.parse_args()
    worlds = QUICK if arguments.quick else CONFIGS
    known = [*worlds, *(mutation.name for mutation in MUTATIONS)]
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no such world or mutation: {', '.join(sorted(unknown))}. Known: {' '.join(known)}")
    began_s, failed_count = time.perf_counter(), 0
    with multiprocessing.Pool() as pool:
        for checked in pool.imap(check, arguments.names or known):
            failed_count += not checked.is_expected
            _print(checked, arguments.trace)
    if not arguments.names:
        failed_count += _host(arguments.trace)
    print(f"{failed_count} not as expected, {time.perf_counter() - began_s:.0f} s")
    return 1 if failed_count else 0


def _host(with_trace: bool) -> int:
    """Searches the worlds of one host, complete and without each rule; returns how many are not as expected."""
    failed_count = 0
    for world, dropped in [
        *((world, "") for world in host.WORLDS),
        *((world, rule) for rule, world in host.DROPPED.items()),
    ]:
        began_s = time.perf_counter()
        found = host.search(world, dropped)
        name, seconds = f"host, {world}{dropped and '/'}{dropped}", time.perf_counter() - began_s
        is_expected = bool(found.broken) == bool(dropped)
        failed_count += not is_expected
        verdict = "broken" if found.broken else "OK"
        steps = f"{len(found.trace)} steps" if found.trace else ""
        print(f"{name:40s} {found.states_count:>9,} states {seconds:7.1f} s  {verdict:6s} {steps}", flush=True)
        if found.broken and (with_trace or not is_expected):
            print(f"    {found.broken}\n    {' > '.join(found.trace)}", flush=True)
    return failed_count


def _print(checked: Checked, with_trace: bool) -> None:
    verdict = checked.broken or "OK"
    ending = "" if checked.is_expected else f"  EXPECTED {checked.expected or 'OK'}"
    steps = f"{len(checked.trace)} steps" if checked.trace else ""
    counted = f"{checked.states_count:>9,} states {checked.seconds:7.1f} s"
    print(f"{checked.name:40s} {counted}  {verdict:4s} {steps}{ending}", flush=True)
    if checked.broken and (with_trace or not checked.is_expected):
        print(f"    {checked.why}\n    {' > '.join(checked.trace)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
