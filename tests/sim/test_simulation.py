"""The simulation as a test: real nodes and collectors keep their promises, and broken ones are caught."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.mutants import first_to_find_mutant
from tests.sim.profiles import BY_NAME, CAPACITY_PROFILES, ONE_HOST
from tests.sim.run import run

SEEDS_MAX = 60
"""Within which a mutant must be found in its own profile; most need fewer than ten."""
MUTANTS = (
    *("f1-move-makes-the-folder", "g4-no-grace", "h1-condemned-is-a-hit", "h3-sweep-forgets-nothing"),
    *(
        "host-log-before-table",
        "host-tables-before-append",
        "host-parents-first",
        "host-no-limit",
        "credit-counts-no-bytes",
    ),
)
"""Mutants that are found fast. ``make sim-mutants`` looks for all of them."""


def test_nothing_breaks_in_a_few_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(16) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


def test_nothing_breaks_on_one_host_in_a_few_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(4) if (outcome := run(seed, profile=ONE_HOST)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --profile one_host --trace"


@pytest.mark.parametrize("name", [profile.name for profile in CAPACITY_PROFILES])
def test_a_full_root_stays_within_its_capacity(name: str) -> None:
    broken = [(seed, outcome.violation) for seed in range(4) if (outcome := run(seed, profile=BY_NAME[name])).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --profile {name} --trace"


@pytest.mark.slow
def test_nothing_breaks_in_many_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(20_000, 20_060) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    assert first_to_find_mutant(name, SEEDS_MAX), f"{name} breaks nothing in {SEEDS_MAX} seeds"


def test_a_seed_gives_the_same_run_every_time() -> None:
    """In two processes, where hashes of bytes are salted differently."""
    program = (
        "from tests.sim.run import run; from tests.sim.profiles import ONE_HOST; "
        "print([run(seed).digest for seed in (1, 2)] + [run(1, profile=ONE_HOST).digest])"
    )
    found = set()
    for salt in ("1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        found.add(done.stdout)
    assert len(found) == 1
