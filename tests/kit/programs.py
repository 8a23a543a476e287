"""Programs of the repository that are no part of the package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[2]


def load_program(path: str) -> ModuleType:
    """The program at this path of the repository."""
    spec = importlib.util.spec_from_file_location(f"kvstore_{Path(path).stem}", SOURCE / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
