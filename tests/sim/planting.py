"""Planting bugs: a table of contexts in which the real code lacks one rule, and the profile that shows each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Bug = Callable[[], AbstractContextManager[object]]

BUGS: dict[str, Bug] = {}
"""By name: that of the model's mutation that drops the same rule, where there is one and no older name here."""
HOMES: dict[str, str] = {}
"""The profile whose runs show a bug most often, for a quick test."""


def bug(home: str) -> Callable[[Callable[[], Iterator[None]]], Bug]:
    """Registers a bug under its function's name; the first line of its docstring says which rule it drops."""

    def register(make: Callable[[], Iterator[None]]) -> Bug:
        planted = contextmanager(make)
        BUGS[make.__name__] = planted
        HOMES[make.__name__] = home
        return planted

    return register
