"""``python -m benchmarks.competitors``: ``--setup`` makes environments, all else is ``benchmarks competitors``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from benchmarks import cli
from benchmarks.competitors.environments import ENVIRONMENTS, NotReady, set_up
from kvstore.cli.signals import aborts, exits_on_sigterm


def _set_up(names: Sequence[str]) -> int:
    failed = False
    for name in names:
        if name not in ENVIRONMENTS:
            print(
                f"competitors: no peer is named {name!r}: expected {', '.join(ENVIRONMENTS)}",
                file=sys.stderr,
            )
            return 2
        _report(f"{name}: setting up (torch takes minutes)" if name == "lmcache" else f"{name}: setting up")
        try:
            set_up(name)
        except NotReady as error:
            failed = True
            print(f"competitors: {name}: {error}", file=sys.stderr)
    if shutil.which("redis-server") is None:
        print("competitors: redis-server is not installed: apt-get install redis-server", file=sys.stderr)
        failed = True
    return 1 if failed else 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with aborts(), exits_on_sigterm():
        if sys.argv[1:2] == ["--setup"]:
            sys.exit(_set_up(sys.argv[2:] or list(ENVIRONMENTS)))
        sys.exit(cli.main(["competitors", *sys.argv[1:]]))
