"""A mutant: a bug that breaks one rule, and the tests that must see it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from tests.mutants.planters import Planter

NAME_VARIABLE = "KVSTORE_MUTANT"
"""The mutant that a process is planted with."""
NOTES_VARIABLE = "KVSTORE_MUTANT_NOTES"
"""The file to which all processes of one run add what happened."""
LIBRARY_VARIABLE = "KVSTORE_MUTANT_LIBRARY"
"""The C library of a mutant that is planted there."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """``name`` begins with the rule of gc/PROTOCOL.md that it breaks, if it breaks one.

    ``tests`` are arguments of pytest: ids of tests, or one ``-k`` expression behind its file.
    """

    name: str
    planter: Planter
    tests: tuple[str, ...]
    native: bool = True
    """False: the tests run without the C library, so that what Python verifies is reached."""


def mutant(name: str, planter: Planter, *tests: str, native: bool = True) -> Mutant:
    """One row of the catalogue. ``tests`` are arguments of pytest, as in a shell; ids are given without ``tests/``."""
    found = tuple(each for part in tests for each in shlex.split(part))
    assert found, name
    return Mutant(name, planter, found, native)
