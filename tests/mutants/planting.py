"""Plants the mutant that the environment names: its modules are changed while they are imported.

That is before anybody has their functions: ``from x import f`` gets the mutant, also in processes that tests start
(``hook/sitecustomize.py``).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from tests.mutants.catalogue import named
from tests.mutants.mutant import NAME_VARIABLE, NOTES_VARIABLE
from tests.mutants.planters import Planter, Unplantable


def note(**what: object) -> None:
    """Adds a line to the notes of this run, in one write: processes share the file."""
    path = os.environ.get(NOTES_VARIABLE)
    if path:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(fd, json.dumps(what).encode() + b"\n")
        finally:
            os.close(fd)


class Planting(Loader):
    """Loads a module as its own loader does, changed."""

    def __init__(self, real: Any, planter: Planter) -> None:
        self._real = real
        self._planter = planter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._real.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module. Raises what planting raises, noted: the run is no proof then."""
        name = module.__name__
        try:
            self._real.exec_module(module)
            self._planter.plant(module)
        except Unplantable as error:
            note(unplantable=str(error))
            raise
        note(planted=name)


class Finder(MetaPathFinder):
    """Finds the modules that a mutant changes, and has them changed."""

    def __init__(self, planter: Planter) -> None:
        self._planter = planter
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that is to be changed, with our loader."""
        if name not in self._planter.modules or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Planting(spec.loader, self._planter)
        return spec


def install() -> None:
    """Has the mutant planted as soon as its modules are imported."""
    try:
        found = named(os.environ[NAME_VARIABLE])
    except KeyError:
        note(unplantable=f"there is no mutant {os.environ[NAME_VARIABLE]}")
        raise
    sys.meta_path.insert(0, Finder(found.planter))
