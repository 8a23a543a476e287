"""The C library of a mutant: kvstore/native, compiled into a temporary folder with one check blind."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.mutants.mutant import LIBRARY_VARIABLE
from tests.mutants.planters import Native, Unplantable

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kvstore" / "native"
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILE_S = 300


def checks() -> list[str]:
    """The names of all checks in the sources. Raises Unplantable where two have one name."""
    found = [name for path in sorted(SOURCES.glob("*.c")) for name in re.findall(r"KV_CHECK\((\w+),", path.read_text())]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise Unplantable(f"kvstore/native has two checks of one name: {', '.join(twice)}")
    return found


def build(planter: Native, folder: Path) -> Path:
    """Compiles the library of a mutant; its path. Raises Unplantable."""
    if not planter.stop and planter.check not in checks():
        raise Unplantable(f"kvstore/native has no KV_CHECK({planter.check}, ...)")
    built = folder / "libkvstore.so"
    command = [
        *(shlex.split(os.environ.get("CC", "")) or ["cc"]),
        *FLAGS,
        "-include",
        str(HERE / "blind.h"),
        f'-DKV_BLIND="{planter.check}"',
        f"-DKV_BLIND_FIRST={planter.first}",
        f"-DKV_BLIND_STOP={planter.stop}",
        "-o",
        str(built),
        *sorted(map(str, SOURCES.glob("*.c"))),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if ran.returncode:
        raise Unplantable(f"the C library does not compile: {ran.stderr[-2000:]}")
    return built


def built_library() -> Path:
    """What the runner has built for this process. Raises Unplantable."""
    path = os.environ.get(LIBRARY_VARIABLE, "")
    if not path:
        raise Unplantable(f"{LIBRARY_VARIABLE} is not set: run it by python -m tests.mutants")
    return Path(path)
