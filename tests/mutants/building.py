"""The C library of a mutant: kvstore/native with one check blind, in a temporary folder.

Only the source with that check is compiled for a mutant; the others are compiled once for all.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from pathlib import Path

from tests.mutants.mutant import LIBRARY_VARIABLE
from tests.mutants.planters import Native, Unplantable

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kvstore" / "native"
FLAGS = ("-O1", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
COMPILE_S = 600
CHECK = re.compile(r"KV_CHECK\((\w+),")
FIELDS = "KV_SAME("


def checks() -> list[str]:
    """The names of all checks in the sources. Raises Unplantable where two have one name."""
    found = [name for path in sorted(SOURCES.glob("*.c")) for name in CHECK.findall(path.read_text())]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise Unplantable(f"kvstore/native has two checks of one name: {', '.join(twice)}")
    return found


class Libraries:
    """The libraries of the mutants of one run, in their own folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._objects: dict[str, Path] = {}

    def build(self, planter: Native, name: str) -> Path:
        """Compiles and links the library of a mutant; its path. Raises Unplantable."""
        blind = _source_of(planter)
        with self._lock:
            objects = [self._object(path) for path in sorted(SOURCES.glob("*.c")) if path != blind]
        mine, built = self._folder / f"{name}.o", self._folder / f"{name}.so"
        switch = [
            *("-include", str(HERE / "blind.h")),
            f'-DKV_BLIND="{planter.check}"',
            f"-DKV_BLIND_FIRST={planter.first}",
            f"-DKV_BLIND_STOP={planter.stop}",
        ]
        _compile([*FLAGS, *switch, "-c", "-o", str(mine), str(blind)])
        _compile(["-shared", "-o", str(built), str(mine), *map(str, objects)])
        return built

    def _object(self, source: Path) -> Path:
        """Compiles a source without a blind check, which every library shares."""
        if source.name not in self._objects:
            made = self._folder / f"{source.stem}.plain.o"
            _compile([*FLAGS, "-c", "-o", str(made), str(source)])
            self._objects[source.name] = made
        return self._objects[source.name]


def built_library() -> Path:
    """Returns the library that the runner has built for this process. Raises Unplantable."""
    path = os.environ.get(LIBRARY_VARIABLE, "")
    if not path:
        raise Unplantable(f"{LIBRARY_VARIABLE} is not set: run it by python -m tests.mutants")
    return Path(path)


def _source_of(planter: Native) -> Path:
    """The source that has a check, or compares the fields of headers. Raises Unplantable."""
    for path in sorted(SOURCES.glob("*.c")):
        text = path.read_text()
        if FIELDS in text if planter.stop else planter.check in CHECK.findall(text):
            return path
    raise Unplantable(f"kvstore/native has no KV_CHECK({planter.check}, ...)")


def _compile(arguments: list[str]) -> None:
    command = [*(shlex.split(os.environ.get("CC", "")) or ["cc"]), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if ran.returncode:
        raise Unplantable(f"the C library does not compile: {ran.stderr[-2000:]}")
