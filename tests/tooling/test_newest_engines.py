"""The check of newer engines sees what a connector would notice, and nothing else (``make engines-newest``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.newest import __main__ as newest
from tests.engines.newest.interfaces import differences, imported, interface, mentioned

BASE = """
from abc import ABC, abstractmethod
from .helpers import helper

class Store(ABC):
    name: str
    limit: int = 3

    def __init__(self, name: str) -> None: ...

    @abstractmethod
    def get(self, keys: list[str], *, wait: bool = False) -> bytes: ...

    def put(self, key): ...

    def stray(self): ...
"""
CONNECTOR = """
from engine.base import Store, helper

class Ours(Store):
    def get(self, keys, *, wait=False):
        return self.name or self.put(getattr(self, "limit"))
"""


def written(folder: Path, base: str = BASE, helpers: str = "def helper(a, b=1): ...") -> Path:
    package = folder / "engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text(base)
    (package / "helpers.py").write_text(helpers)
    return folder


def told(
    tmp_path: Path, was: str, becomes: str, name: str = "Store", helpers: str = "def helper(a, b=1): ..."
) -> list[str]:
    """The differences that a connector is told of after one edit of its engine."""
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "connector.py").write_text(CONNECTOR)
    assert imported(ours, "engine") == {("engine.base", "Store"), ("engine.base", "helper")}
    assert was in BASE
    before = interface(written(tmp_path / "before"), ("engine.base", name))
    now = interface(written(tmp_path / "now", BASE.replace(was, becomes), helpers), ("engine.base", name))
    return list(differences(before, now, mentioned(ours)))


@pytest.mark.parametrize(
    ("was", "becomes", "line"),
    [
        (
            "wait: bool = False",
            "wait_s: float = 0",
            "def get(self, keys: list[str], *, wait: bool=False) -> bytes is now ",
        ),
        ("    def put(self, key): ...\n", "", "def put(self, key) is gone"),
        ("name: str\n", "title: str\n", "name: str is gone"),
        ("limit: int = 3", "limit: float = 3", "limit: int is now limit: float"),
        (
            "    def stray",
            "    @abstractmethod\n    def new(self): ...\n\n    def stray",
            "def new(self) is new, and subclasses",
        ),
        ("    def put", "    @abstractmethod\n    def put", "put must be in subclasses now"),
        ("class Store(ABC)", "class Store", "class Store(ABC) is now class Store()"),
        (
            "__init__(self, name: str)",
            "__init__(self, name: str, more: int)",
            "def __init__(self, name: str) -> None is now",
        ),
        ("class Store", "class Shop", "is gone"),
    ],
)
def test_what_a_connector_uses_is_told(tmp_path: Path, was: str, becomes: str, line: str) -> None:
    found = told(tmp_path, was, becomes)
    assert len(found) == 1 and found[0].startswith(line)


def test_a_name_that_a_module_hands_on_is_followed(tmp_path: Path) -> None:
    found = told(tmp_path, "", "", "helper", "def helper(a, c): ...")
    assert found == ["def helper(a, b=1) is now def helper(a, c)"]


@pytest.mark.parametrize("name", newest.ENGINES)
def test_the_tests_pin_what_is_compared(name: str) -> None:
    assert newest.tested_version(name, newest.ENGINES[name].tested)[0].isdigit()
