"""Vulture finds code that nothing uses, and its list of names to ignore has none that it does not need."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from vulture.core import Vulture

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["vulture"]


def unused() -> list[tuple[str, str]]:
    """The name and place of all that vulture takes for dead, ignored or not."""
    vulture = Vulture()
    vulture.scavenge([str(ROOT / path) for path in SETTINGS["paths"]], exclude=SETTINGS["exclude"])
    found = vulture.get_unused_code(min_confidence=SETTINGS["min_confidence"])
    return [(item.name, f"{item.filename}:{item.first_lineno}") for item in found]


@pytest.mark.slow  # and `make check` runs vulture itself
def test_nothing_is_dead_and_no_name_is_ignored_without_need() -> None:
    found, ignored = unused(), SETTINGS["ignore_names"]
    dead = [where for name, where in found if not any(fnmatchcase(name, each) for each in ignored)]
    assert not dead, "nothing in kvstore or gc uses this: delete it"
    needless = [each for each in ignored if not any(fnmatchcase(name, each) for name, _ in found)]
    assert not needless, "these names need not be ignored: take them out of pyproject.toml"
