"""Builds the native data path (kvstore/native) while kvstore is installed or packed, where there is a C compiler.

Without one kvstore is pure Python: slower, and the same in everything else.  ``KVSTORE_NATIVE=0`` in the environment of
the build leaves the library out; ``CC`` names the compiler.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("kvstore") / "native"
LIBRARY = "libkvstore.so"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-s")
COMPILE_S = 900
"""It takes two seconds of processor time. A busy or suspended machine must not end up with pure Python."""


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles the library beside its sources and takes it into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is packed; ``version`` is "editable" for an editable installation."""
        folder = Path(self.root) / FOLDER
        reason = build(folder)
        if reason:
            self.app.display_warning(f"kvstore: pure Python, without the native data path: {reason}")
            remove_outdated(folder)
            return
        build_data["pure_python"] = False
        # It asks nothing of Python, so any version of it will do.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(f"/{FOLDER}/{LIBRARY}")


def build(folder: Path) -> str:
    """Compiles the library in ``folder``; returns why not, or nothing."""
    if os.environ.get("KVSTORE_NATIVE") == "0":
        return "KVSTORE_NATIVE=0"
    if not sys.platform.startswith("linux"):
        return f"it is for Linux, not {sys.platform}"
    named = shlex.split(os.environ.get("CC", "")) or ["cc"]
    compiler = shutil.which(named[0])
    if compiler is None:
        return f"there is no C compiler ({named[0]})"
    fresh = folder / f".{LIBRARY}.{os.getpid()}"
    sources = sorted(str(path) for path in folder.glob("*.c"))
    try:
        ran = subprocess.run(
            [compiler, *named[1:], *FLAGS, "-o", str(fresh), *sources],
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
            check=False,
        )
        if ran.returncode:
            return f"{compiler} failed: {ran.stderr.strip()[-2000:]}"
        # Processes that have the old one mapped keep it.
        fresh.replace(folder / LIBRARY)
    except (OSError, subprocess.TimeoutExpired) as cause:
        return f"{compiler} did not run: {cause}"
    finally:
        with suppress(OSError):
            fresh.unlink()
    return ""


def remove_outdated(folder: Path) -> None:
    """Removes a library that an earlier build left if it is older than the sources; one that is not stays in use."""
    library = folder / LIBRARY
    # OSError: there is none, or the folder cannot be written to.
    with suppress(OSError):
        if library.stat().st_mtime < max(path.stat().st_mtime for path in folder.glob("*.[ch]")):
            library.unlink()
