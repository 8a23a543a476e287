"""Programs: those of the repository that are no part of the package, as modules; and any, run to its end."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.kit.patience import PATIENCE_S

SOURCE = Path(__file__).resolve().parents[2]


def load_program(path: str) -> ModuleType:
    """The program at this path of the repository."""
    spec = importlib.util.spec_from_file_location(f"kvstore_{Path(path).stem}", SOURCE / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ended(*command: str | Path, check: bool = False, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program in the folder of the repository to its end; what it said is text."""
    given: dict[str, Any] = {"cwd": SOURCE, "timeout": PATIENCE_S, **more}
    return subprocess.run(command, check=check, capture_output=True, text=True, **given)


def forked() -> Callable[[], None]:
    """Forks a child that keeps what it inherits, until the returned function ends it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)

    def end() -> None:
        os.close(writer)
        os.waitpid(child, 0)

    return end
