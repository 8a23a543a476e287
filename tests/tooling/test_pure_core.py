"""The pure core does no I/O, takes no clock and makes no randomness: only these imports, and no ``open`` or ``print``.

The import contracts in pyproject.toml cannot say this, because they do not see the standard library.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KVSTORE = Path(__file__).resolve().parents[2] / "kvstore"
PURE_NAMES = (
    "address",
    "brief",
    "checks",
    "errors",
    "hints",
    "layout",
    "lifecycle",
    "namespace",
    "parsing",
    "recency",
    "tokens",
)
PURE_FOLDERS = ("format", "planning")
PURE_FILES = [KVSTORE / f"{name}.py" for name in PURE_NAMES if (KVSTORE / f"{name}.py").exists()]
PURE_FILES += sorted(path for name in PURE_FOLDERS for path in (KVSTORE / name).rglob("*.py"))

ALLOWED = {
    *("__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "contextlib", "dataclasses", "enum"),
    *("functools", "hashlib", "heapq", "hmac", "itertools", "json", "math", "numbers", "operator", "re", "string"),
    *("struct", "types", "typing"),
    *("ml_dtypes", "numpy", "xxhash"),
}
# kvstore.buffers names the types of memory that is passed along; it is pure but for the lock inside ``Borrowed``.
ALLOWED_KVSTORE = {
    *(f"kvstore.{name}" for name in PURE_NAMES),
    *(f"kvstore.{name}" for name in PURE_FOLDERS),
    "kvstore.buffers",
}
FORBIDDEN_CALLS = {"open", "print", "input", "breakpoint", "exec", "eval", "__import__"}


def impurities(source: str) -> list[str]:
    """Returns what a pure module must not do and ``source`` does, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [f"line {node.lineno}: imports {name}" for name in imported(node) if not allowed(name)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: calls {node.func.id}()")
    return found


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names of the modules that one statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.module == "kvstore":
        return [f"kvstore.{alias.name}" for alias in node.names]
    return [node.module or ""]


def allowed(name: str) -> bool:
    """True if a pure module may import ``name``."""
    parts = name.split(".")
    return ".".join(parts[:2]) in ALLOWED_KVSTORE if parts[0] == "kvstore" else parts[0] in ALLOWED


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: str(path.relative_to(KVSTORE)))
def test_a_pure_module_imports_nothing_that_does_io(path: Path) -> None:
    assert impurities(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import numpy, time",
        "from threading import Lock",
        "def f():\n    from random import random",
        "import grpc",
        "import kvstore.root.posix",
        "from kvstore import sources",
        "data = open('x').read()",
    ],
)
def test_an_impure_module_is_caught(source: str) -> None:
    assert len(impurities(source)) == 1


def test_the_pure_core_is_found() -> None:
    assert {path.name for path in PURE_FILES} >= {"address.py", "errors.py", "layout.py", "namespace.py", "tokens.py"}
    assert {path.parent.name for path in PURE_FILES} >= set(PURE_FOLDERS)
