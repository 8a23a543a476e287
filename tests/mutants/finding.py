"""Finds a mutant of the catalogue or of the old table. Imports nothing of kvstore: it is read before planting."""

from __future__ import annotations

from tests.mutants import catalogue, table
from tests.mutants.mutant import Mutant


def named(name: str) -> Mutant:
    """The mutant of a name, of the catalogue first. Raises KeyError."""
    try:
        return catalogue.named(name)
    except KeyError:
        return table.named(name)
