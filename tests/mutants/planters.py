"""Ways to plant a bug: a public function or method with another behaviour, or the C library with one check blind.

A target is ``module:function`` or ``module:Class.method``.  A planter that no longer fits the code raises Unplantable:
a mutant that silently breaks nothing would count as a survivor of good tests.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol


class Unplantable(Exception):
    """The code that a mutant changes no longer exists."""


class Planter(Protocol):
    """One way to break the code."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that are changed."""
        ...

    def plant(self, module: ModuleType) -> None:
        """Changes a module right after it was executed."""
        ...

    def fits(self, module: str, text: str) -> None:
        """Raises Unplantable if the source of a module no longer has the place of the bug."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """A function or a method in a module."""

    module: str
    name: str

    @classmethod
    def of(cls, text: str) -> Target:
        """From ``module:name``."""
        module, _, name = text.partition(":")
        assert module and name, text
        return cls(module, name)


@dataclass(frozen=True, slots=True)
class Wrap:
    """A function in whose place ``make(function)`` is called."""

    target: Target
    make: Callable[[Callable[..., Any]], Any]

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.target.module,)

    def plant(self, module: ModuleType) -> None:
        *path, name = self.target.name.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        found = inspect.getattr_static(owner, name, None)
        if found is None:
            raise Unplantable(f"there is no {self.target}")
        kind = type(found) if isinstance(found, (staticmethod, classmethod, property)) else None
        if kind is None:
            setattr(owner, name, self.make(found))
        else:
            inner: Any = found.fget if isinstance(found, property) else found.__func__
            setattr(owner, name, kind(self.make(inner)))

    def fits(self, module: str, text: str) -> None:
        tree = ast.parse(text)
        assigned = (one.targets for one in tree.body if isinstance(one, ast.Assign))
        if self.target.name not in {each.id for found in assigned for each in found if isinstance(each, ast.Name)}:
            _defined(tree, self.target)


@dataclass(frozen=True, slots=True)
class Several:
    """Several changes that make one bug."""

    parts: tuple[Planter, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(module for part in self.parts for module in part.modules)

    def plant(self, module: ModuleType) -> None:
        for part in self.parts:
            if module.__name__ in part.modules:
                part.plant(module)

    def fits(self, module: str, text: str) -> None:
        for part in self.parts:
            if module in part.modules:
                part.fits(module, text)


@dataclass(frozen=True, slots=True)
class Native:
    """The C library with one check blind (``blind.h``): the one named, or that of bytes ``first`` to ``stop`` - 1 of
    the header.
    """

    check: str
    first: int = 0
    stop: int = 0

    @property
    def modules(self) -> tuple[str, ...]:
        return ("kvstore.native.library",)

    def plant(self, module: ModuleType) -> None:
        from tests.mutants.building import built_library

        loaded: Any = module
        loaded.LIBRARY = built_library()
        loaded.library, loaded.brief, loaded._reason = loaded._load()
        if loaded.library is loaded.PurePython:
            raise Unplantable(f"the blind library was not loaded: {loaded._reason}")

    def fits(self, module: str, text: str) -> None: ...


def several(*parts: Planter) -> Several:
    """Changes that are one bug together."""
    return Several(parts)


def blind(check: str) -> Native:
    """The C library without the check ``KV_CHECK(check, ...)``."""
    return Native(check)


def blind_field(name: str, first: int, size: int) -> Native:
    """The C library that does not compare ``size`` bytes of the header from ``first`` on."""
    return Native(f"field {name}", first, first + size)


def _defined(tree: ast.Module, target: Target) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """Returns the line of a function's definition, without its decorators."""
    body: list[ast.stmt] = tree.body
    found: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    for part in target.name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = [each for each in body if isinstance(each, kinds) and each.name == part]
        if not named:
            raise Unplantable(f"there is no {textwrap.shorten(str(target), 200)}")
        found = named[-1]
        body = found.body
    assert found is not None
    return found
