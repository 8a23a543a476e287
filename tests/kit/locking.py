"""Locks that know their rank: while one is held, only those of a higher rank may be taken (kvstore/LOCKS.md).

Production makes plain locks. Here each lock of kvstore is wrapped, and finds its rank by the place where it was made,
so every test also checks the order. Two threads that take the same locks in one order never deadlock on them.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "kvstore" / "LOCKS.md"
SOURCES = {"kvstore": ROOT / "kvstore", "gc": ROOT / "gc" / "kvstore_gc"}
MAKERS = frozenset({"Lock", "Condition", "RLock"})
_ROW = re.compile(r"\| `(\S+)` \| (\d+) \| .+ \|")
_held = threading.local()
_parsing = threading.Lock()
"""Python 3.11 counts the depth of all parsers in one place: two threads at once, and one gets a SystemError."""
PARSES_MAX = 100
violations: list[str] = []
"""What went wrong so far, in any thread; a test that leaves some fails."""


def ranks() -> dict[str, int]:
    """The rank of each lock, as the page has it."""
    found = [(row[1], int(row[2])) for line in PAGE.read_text().splitlines() if (row := _ROW.fullmatch(line))]
    assert len({name for name, _ in found}) == len(found), "a lock has two rows"
    return dict(found)


@cache
def locks_in(path: Path) -> dict[int, str]:
    """The locks that a file makes: their names, such as ``node.known.Known._lock``, by the line."""
    base = SOURCES["gc"].parent if SOURCES["gc"] in path.parents else SOURCES["kvstore"]
    module = ".".join(path.relative_to(base).with_suffix("").parts)
    found: dict[int, str] = {}
    bare: set[str] = set()

    def visit(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = f"{within}.{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef) else within
            if isinstance(child, ast.Assign):
                targets = [each for target in child.targets for each in getattr(target, "elts", [target])]
                values = getattr(child.value, "elts", [child.value])
                for target, value in zip(targets, values, strict=False):
                    if isinstance(value, ast.Call) and _makes_a_lock(value, bare):
                        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "?")
                        found[value.lineno] = f"{module}{within.removesuffix('.__init__')}.{name}"
            visit(child, inside)

    with _parsing:
        tree = _parsed(path.read_text())
    bare.update(
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "threading"
        for alias in node.names
    )
    visit(tree, "")
    return found


def all_locks() -> set[str]:
    """Every lock that kvstore and its collector make."""
    files = [path for folder in SOURCES.values() for path in folder.rglob("*.py") if "v1" not in path.parts]
    return {name for path in files for name in locks_in(path).values()}


def _parsed(text: str) -> ast.Module:
    """Parses a file. Tries again if another thread parsed at the same time: printing a traceback parses too."""
    for _ in range(PARSES_MAX - 1):
        try:
            return ast.parse(text)
        except SystemError:
            time.sleep(0.01)
    return ast.parse(text)


def _makes_a_lock(call: ast.Call, bare: set[str]) -> bool:
    """True if that is ``threading.Lock()``, or a name that the file has from there."""
    match call.func:
        case ast.Attribute(ast.Name("threading"), name):
            return name in MAKERS
        case ast.Name(name):
            return name in MAKERS & bare
    return False


def _name_at(frame: FrameType | None) -> str | None:
    """Returns the lock that is made at a frame; None outside of kvstore."""
    if frame is None:
        return None
    return _locks_of(frame.f_code.co_filename).get(frame.f_lineno)


@cache
def _locks_of(filename: str) -> dict[int, str]:
    """Returns the locks of a file by its name, as ``locks_in`` does; none for a file that is not ours."""
    path = Path(filename)
    return locks_in(path) if any(folder in path.parents for folder in SOURCES.values()) else {}


def _taking(name: str, lock: object) -> None:
    """Called before a thread waits for a lock."""
    held = _stack()
    if not held:
        return
    if any(each == id(lock) for _, each in held):
        return  # a condition, entered again
    for other, _ in held:
        if _RECORD is not None:
            _note(other, name)
        elif _RANKS.get(other, 0) >= _RANKS.get(name, 0):
            violations.append(f"{name} ({_RANKS.get(name)}) is taken while {other} ({_RANKS.get(other)}) is held")


def _took(name: str, lock: object) -> None:
    _stack().append((name, id(lock)))


def _left(lock: object) -> None:
    held = _stack()
    for at in range(len(held) - 1, -1, -1):
        if held[at][1] == id(lock):
            del held[at]
            return


def _stack() -> list[tuple[str, int]]:
    try:
        found: list[tuple[str, int]] = _held.stack
    except AttributeError:
        found = _held.stack = []
    return found


class RankedLock:
    """A lock of kvstore's; ``inner`` is the real one."""

    __slots__ = ("_inner", "_name")

    def __init__(self, name: str, inner: Any) -> None:
        self._name = name
        self._inner = inner

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout == -1:
            _taking(self._name, self)  # one that gives up waits for nobody for ever
        done: bool = self._inner.acquire(blocking, timeout)
        if done:
            _took(self._name, self)
        return done

    def release(self) -> None:
        self._inner.release()
        _left(self)

    def locked(self) -> bool:
        return bool(self._inner.locked())

    # Written out: most locks are taken so, thousands of times in a test.

    def __enter__(self) -> None:
        stack = _stack()
        if stack:
            _taking(self._name, self)
        self._inner.acquire()
        stack.append((self._name, id(self)))

    def __exit__(self, *_: object) -> None:
        self._inner.release()
        stack = _stack()
        if stack and stack[-1][1] == id(self):
            stack.pop()
        else:
            _left(self)

    # For ``threading.Condition``, over a lock that may be entered more than once.

    def _is_owned(self) -> bool:
        return bool(self._inner._is_owned())

    def _release_save(self) -> Any:
        while any(each == id(self) for _, each in _stack()):
            _left(self)
        return self._inner._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._inner._acquire_restore(state)
        for _ in range(state[0]):  # an RLock's count
            _took(self._name, self)


def install() -> None:
    """Has kvstore make locks that know their rank from now on. To be called before it is imported."""
    make_lock, make_condition, make_inner = threading.Lock, threading.Condition, threading.RLock

    def lock() -> Any:
        name = _name_at(sys._getframe(1))
        return make_lock() if name is None else RankedLock(name, make_lock())

    class Condition(make_condition):  # type: ignore[misc, valid-type]
        def __init__(self, lock: Any = None) -> None:
            name = _name_at(sys._getframe(1)) if lock is None else None
            super().__init__(lock if name is None else RankedLock(name, make_inner()))

    threading.Lock = lock  # type: ignore[assignment]
    threading.Condition = Condition  # type: ignore[misc]


_RECORD = os.environ.get("KVSTORE_LOCKS_RECORD")
"""A file that gets each pair of locks that is held together, for writing the page anew."""
_RANKS = ranks() if PAGE.exists() else {}
_seen: set[tuple[str, str]] = set()


def _note(outer: str, inner: str) -> None:
    if (outer, inner) not in _seen:
        _seen.add((outer, inner))
        with open(str(_RECORD), "a", encoding="ascii") as file:
            file.write(f"{outer} {inner}\n")
