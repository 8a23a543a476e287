"""Mutants: access."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
