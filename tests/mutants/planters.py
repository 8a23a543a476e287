"""Ways to plant a bug: in the source of a function, around a function, in the C library, or one of the simulation's.

A target is ``module:function`` or ``module:Class.method``.  A planter that no longer fits the code raises Unplantable:
a mutant that silently breaks nothing would count as a survivor of good tests.
"""

from __future__ import annotations

import ast
import functools
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

    def source(self, module: str, text: str) -> str:
        """The source of a module, changed before it is executed."""
        ...

    def plant(self, module: ModuleType) -> None:
        """Changes a module right after it was executed."""
        ...

    def fits(self, module: str, text: str) -> None:
        """True if it still fits the source of a module, as far as that shows. Raises Unplantable."""
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
class Edit:
    """Replaces ``old`` in a function's source by ``new``."""

    target: Target
    old: str
    new: str

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.target.module,)

    def source(self, module: str, text: str) -> str:
        lines = text.splitlines(keepends=True)
        found = _defined(ast.parse(text), self.target)
        assert found.end_lineno is not None
        before, after = lines[: found.lineno - 1], lines[found.end_lineno :]
        own = "".join(lines[found.lineno - 1 : found.end_lineno])
        if own.count(self.old) != 1:
            raise Unplantable(f"{self.target} has {own.count(self.old)} times {self.old!r}: expected one")
        return "".join([*before, own.replace(self.old, self.new), *after])

    def plant(self, module: ModuleType) -> None: ...

    def fits(self, module: str, text: str) -> None:
        compile(self.source(module, text), module, "exec")


@dataclass(frozen=True, slots=True)
class Wrap:
    """A function in whose place ``make(function)`` is called."""

    target: Target
    make: Callable[[Callable[..., Any]], Any]

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.target.module,)

    def source(self, module: str, text: str) -> str:
        return text

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

    def source(self, module: str, text: str) -> str:
        for part in self.parts:
            if module in part.modules:
                text = part.source(module, text)
        return text

    def plant(self, module: ModuleType) -> None:
        for part in self.parts:
            if module.__name__ in part.modules:
                part.plant(module)

    def fits(self, module: str, text: str) -> None:
        compile(self.source(module, text), module, "exec")


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

    def source(self, module: str, text: str) -> str:
        return text

    def plant(self, module: ModuleType) -> None:
        from tests.mutants.building import built_library

        loaded: Any = module
        loaded.LIBRARY = built_library()
        loaded.library, loaded.brief, loaded._reason = loaded._load()
        if loaded.library is None:
            raise Unplantable(f"the blind library was not loaded: {loaded._reason}")

    def fits(self, module: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Simulated:
    """A bug of the simulation (tests/sim/bugs.py), planted by ``plugin.py`` in pytest's own process."""

    name: str

    @property
    def modules(self) -> tuple[str, ...]:
        return ()

    def source(self, module: str, text: str) -> str:
        return text

    def plant(self, module: ModuleType) -> None: ...

    def fits(self, module: str, text: str) -> None: ...


def edit(target: str, old: str, new: str) -> Edit:
    """Changes one place in the source of a function, which must have ``old`` exactly once."""
    return Edit(Target.of(target), old, new)


def replace(target: str, function: Callable[..., Any]) -> Wrap:
    """Calls another function instead."""
    return Wrap(Target.of(target), lambda real: function)


def skip(target: str, result: Any = None) -> Wrap:
    """Does nothing, and returns ``result``."""
    return Wrap(Target.of(target), lambda real: lambda *args, **named: result)


def before(target: str, change: Callable[..., Any]) -> Wrap:
    """Calls ``change`` with the same arguments first."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def planted(*args: Any, **named: Any) -> Any:
            change(*args, **named)
            return real(*args, **named)

        return planted

    return Wrap(Target.of(target), make)


def after(target: str, change: Callable[..., Any]) -> Wrap:
    """Returns ``change(result, *args)`` instead of the result."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def planted(*args: Any, **named: Any) -> Any:
            return change(real(*args, **named), *args)

        return planted

    return Wrap(Target.of(target), make)


def several(*parts: Planter) -> Several:
    """Changes that are one bug together."""
    return Several(parts)


def blind(check: str) -> Native:
    """The C library without the check ``KV_CHECK(check, ...)``."""
    return Native(check)


def blind_field(name: str, first: int, size: int) -> Native:
    """The C library that does not compare ``size`` bytes of the header from ``first`` on."""
    return Native(f"field {name}", first, first + size)


def simulated(name: str) -> Simulated:
    """A bug of tests/sim/bugs.py."""
    return Simulated(name)


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
