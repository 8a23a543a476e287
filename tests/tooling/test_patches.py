"""Tests patch kvstore in tests/kit and the simulation alone; limits are passed in. The list of what is left shrinks."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
BY_PATH = re.compile(r"setattr\(\s*f?\"kvstore|patch\(\s*f?\"kvstore")
CONSTANT = re.compile(r"setattr\(\s*[\w.]+(?:\[[^\]]*\])?, \"[A-Z_]{3,}\"")
CONSTANTS_LEFT = {
    "benchmarks": 8, "client": 5, "connectors": 5, "engines": 4, "memory": 3, "batch": 2, "native": 1,
}  # fmt: skip


def _found(patch: re.Pattern[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in TESTS.rglob("*.py"):
        folder = path.relative_to(TESTS).parts[0]
        if folder not in ("kit", "mutants", "tooling", "sim"):
            found[folder] += len(patch.findall(path.read_text()))
    return +found


def test_no_test_patches_kvstore_by_a_path() -> None:
    assert not _found(BY_PATH), "pass a limit, a clock or a fault of tests/kit instead"


def test_patches_of_constants_are_not_added() -> None:
    grown = {folder: count for folder, count in _found(CONSTANT).items() if count > CONSTANTS_LEFT.get(folder, 0)}
    assert not grown, f"make it a field of the limits that are passed in: {grown}"
