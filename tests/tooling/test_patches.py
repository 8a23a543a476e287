"""Tests patch internals of kvstore only in tests/kit; this list of what is left may only shrink."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PATCH = re.compile(r"setattr\(\s*f?\"kvstore|patch\(\s*f?\"kvstore")
LEFT = {
    "census": 9, "node": 7, "gc": 5, "bulk": 1, "sim": 3, "root": 2, "connectors": 2, "engines": 1, "control": 1,
    "cli": 1, "client": 1, "tiers": 1, "host": 1, "fsck": 1,
}  # fmt: skip


def test_patches_by_module_path_are_not_added() -> None:
    found: Counter[str] = Counter()
    for path in TESTS.rglob("*.py"):
        folder = path.relative_to(TESTS).parts[0]
        if folder not in ("kit", "mutants", "tooling"):
            found[folder] += len(PATCH.findall(path.read_text()))
    grown = {folder: count for folder, count in found.items() if count > LEFT.get(folder, 0)}
    assert not grown, f"pass a limit, a clock or a fault of tests/kit instead of patching kvstore: {grown}"
