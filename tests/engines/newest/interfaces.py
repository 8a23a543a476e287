"""The interfaces of an engine, read from its sources: no engine is imported, so none of its dependencies is needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HOPS_MAX = 8
"""Modules that hand a name on to the next one."""
Name = tuple[str, str]
"""A module, and a name in it."""


@dataclass
class Interface:
    """A class or function as its users see it: each member's declaration by its name, and "" for its own.

    ``demanded`` are the abstract methods.
    """

    members: dict[str, str] = field(default_factory=dict)
    demanded: frozenset[str] = frozenset()


def imported(folder: Path, package: str) -> set[Name]:
    """Returns the names of a package that the modules below ``folder`` import."""
    found: set[Name] = set()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
                found.update((node.module, alias.name) for alias in node.names)
    return found


def mentioned(folder: Path) -> set[str]:
    """Returns the names that modules below ``folder`` may use of an object: as attribute, method, keyword or text."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.Constant(value=str(name)):
                    found.add(name)
                case ast.keyword(arg=str(name)):
                    found.add(name)
    return found


def interface(sources: Path, name: Name) -> Interface | None:
    """Returns what a name stands for in a package below ``sources``; None if it is not there."""
    return _resolved(sources, *name, HOPS_MAX)


def differences(before: Interface | None, now: Interface | None, used: set[str]) -> Iterator[str]:
    """Says in a line each what a user of an interface would notice who mentions the names ``used``."""
    if before is None or now is None:
        yield "is gone" if before else "is new" if now else "is in neither version"
        return
    for member in sorted(before.members.keys() | now.members.keys()):
        was, here = before.members.get(member), now.members.get(member)
        if was == here or not (member in used or member in ("", "__init__") or member in now.demanded):
            continue
        if here is None:
            yield f"{was} is gone"
        elif was is not None:
            yield f"{was} is now {here}"
        elif member in now.demanded:
            yield f"{here} is new, and subclasses must have it"
    for member in sorted((now.demanded - before.demanded) & before.members.keys()):
        yield f"{member} must be in subclasses now"


def _resolved(sources: Path, module: str, name: str, hops: int) -> Interface | None:
    path = _file_of(sources, module)
    if path is None or hops == 0:
        return None
    tree = ast.parse(path.read_text())
    for node in _statements(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return Interface({"": _declaration(node)})
        if isinstance(node, ast.ImportFrom):
            target = _absolute(module, path, node)
            for alias in node.names:
                if alias.name == "*" and (found := _resolved(sources, target, name, hops - 1)):
                    return found
                if (alias.asname or alias.name) == name:
                    return _resolved(sources, target, alias.name, hops - 1)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return Interface({"": ast.unparse(node)})
    return _of_module(sources, module, name)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, those behind an ``if`` or a ``try`` too."""
    waiting: list[ast.stmt] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If | ast.Try):
            waiting.extend(reversed([*node.body, *node.orelse]))
        else:
            yield node


def _file_of(sources: Path, module: str) -> Path | None:
    base = sources.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _of_module(sources: Path, module: str, name: str) -> Interface | None:
    """A module as a name of its package: it is there, and its members are its own business."""
    return Interface({"": "module"}) if _file_of(sources, f"{module}.{name}") is not None else None


def _absolute(module: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _of_class(node: ast.ClassDef) -> Interface:
    found = {"": f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"}
    demanded = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_") and child.name != "__init__":
                continue
            found[child.name] = _declaration(child)
            if any("abstractmethod" in ast.unparse(each) for each in child.decorator_list):
                demanded.add(child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found[child.target.id] = f"{child.target.id}: {ast.unparse(child.annotation)}"
        elif isinstance(child, ast.Assign):
            found.update((name, ast.unparse(child)) for name in _targets(child) if not name.startswith("_"))
    return Interface(found, frozenset(demanded))


def _declaration(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    begin = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{begin} {node.name}({ast.unparse(node.args)}){returns}"
