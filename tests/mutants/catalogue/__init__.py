"""The catalogue of mutants, planted at interfaces. Imports nothing of kvstore: it is read before planting."""

from __future__ import annotations

from importlib import import_module

from tests.mutants.mutant import Mutant

PARTS = (
    "roots",
    "metadata",
    "nodes",
    "collectors",
    "formats",
    "tiers",
    "transports",
    "access",
    "limits",
    "promises",
    "hosts",
    "native",
)


def all_mutants() -> list[Mutant]:
    """Every mutant, in order."""
    found: list[Mutant] = []
    for part in PARTS:
        found += import_module(f"{__name__}.{part}").MUTANTS
    names = [each.name for each in found]
    assert len(names) == len({*names}), f"two mutants have one name: {sorted(n for n in names if names.count(n) > 1)}"
    return found


def named(name: str) -> Mutant:
    """The mutant of a name. Raises KeyError."""
    return {each.name: each for each in all_mutants()}[name]
