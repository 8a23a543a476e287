"""Limits on sizes that ruff does not check: lines of a file, lines of a function, methods of a class.

Larger things are listed here, and ruff's exceptions in pyproject.toml. Both lists are exact: they may only shrink.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kvstore", "gc")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
METHODS_MAX = 25
RULES = ("C901", "PLR0911", "PLR0912", "PLR0913", "PLR0915")

LARGE = {
    "kvstore/client/local.py LocalPort": 26,
    "kvstore/client/remote.py": 412,
    "kvstore/client/remote.py RemotePort": 28,
    "kvstore/memory/inventory.py Inventory": 26,
    "kvstore/node/disk_shelf.py DiskShelf": 27,
    "kvstore/node/memory_tier.py": 423,
    "kvstore/node/memory_tier.py MemoryTier": 40,
    "kvstore/node/node.py": 462,
    "kvstore/node/node.py Node": 34,
    "kvstore/node/node.py Node.__init__": 84,
    "kvstore/wire/bulk/channel.py Channel": 28,
}
"""Lines of a file or function, or methods of a class."""

UNFORMATTED = {"kvstore/client/remote.py": 1, "kvstore/node/node.py": 3}
"""Statements that the formatter may not touch."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    """The files that people write; kvstore/v1 is generated."""
    found = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if path.parent != ROOT / "kvstore" / "v1"]


def too_large(name: str, text: str) -> Iterator[tuple[str, int]]:
    """Yields the parts of a file that exceed a limit, with their sizes."""
    if (count := len(text.splitlines())) > FILE_LINES_MAX:
        yield name, count
    yield from _too_large_in(ast.parse(text), f"{name} ")


def _too_large_in(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(parent):
        if not isinstance(child, Function | ast.ClassDef):
            yield from _too_large_in(child, prefix)
            continue
        name = f"{prefix}{child.name}"
        if isinstance(child, ast.ClassDef):
            count, most = sum(isinstance(each, Function) for each in child.body), METHODS_MAX
        else:
            count, most = (child.end_lineno or child.lineno) - child.lineno + 1, FUNCTION_LINES_MAX
        if count > most:
            yield name, count
        yield from _too_large_in(child, f"{name}.")


def test_nothing_is_larger_than_it_may_be() -> None:
    found: dict[str, int] = {}
    for path in sources():
        found.update(too_large(str(path.relative_to(ROOT)), path.read_text()))
    grown = {name: count for name, count in found.items() if count > LARGE.get(name, 0)}
    assert not grown, "larger than the limit, or than LARGE has it: split it"
    assert found == LARGE, "it has become smaller: lower its number in LARGE, or take it out"


def test_ruff_leaves_nothing_alone_that_keeps_the_limits() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    listed = {
        (name, rule)
        for name, rules in settings["per-file-ignores"].items()
        for rule in rules
        if rule in RULES and name.startswith(SOURCES)
    }
    limits = (
        f"lint.mccabe.max-complexity={settings['mccabe']['max-complexity']}",
        f"lint.pylint.max-args={settings['pylint']['max-args']}",
    )
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format=json", "--exit-zero", "--no-cache"]
    command += [f"--select={','.join(RULES)}", "--extend-exclude=kvstore/v1"]
    command += [part for limit in limits for part in ("--config", limit)]
    said = subprocess.run([*command, *SOURCES], cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=True)
    found = {(str(Path(each["filename"]).relative_to(ROOT)), each["code"]) for each in json.loads(said.stdout)}
    assert listed == found, "take out of pyproject.toml what is not over a limit any more"


def test_the_formatter_formats_everything() -> None:
    found = {
        str(path.relative_to(ROOT)): count for path in sources() if (count := path.read_text().count("# fmt: skip"))
    }
    assert found == UNFORMATTED, "let the formatter have it; where it has become fewer, lower UNFORMATTED"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\n" * 400, []),
        ("x = 1\n" * 401, [("f", 401)]),
        ("def g():\n" + "    x = 1\n" * 59, []),
        ("class C:\n    def g():\n" + "        x = 1\n" * 60, [("f C.g", 61)]),
        ("if True:\n    async def g():\n" + "        x = 1\n" * 60, [("f g", 61)]),
        ("class C:\n" + "    def g(): ...\n" * 25, []),
        ("class C:\n" + "    def g(): ...\n" * 26, [("f C", 26)]),
    ],
)
def test_what_is_too_large_is_found(text: str, found: list[tuple[str, int]]) -> None:
    assert [*too_large("f", text)] == found
