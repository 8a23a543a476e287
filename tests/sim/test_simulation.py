"""The simulation as a test: real nodes and collectors keep their promises, and broken ones are caught."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kit.cases import for_each
from tests.sim.bugs import BUGS
from tests.sim.bugs import HOMES as BUG_HOMES
from tests.sim.mutants import first_to_find_mutant
from tests.sim.profiles import BY_NAME, CAPACITY_PROFILES, ONE_HOST
from tests.sim.run import first_to_find, run

FAST = ("log_clears_cache", "overrun_clears_cache", "children_first", "room_is_limited", "reads_pins")
"""The bugs of one host that the first seeds find."""
HOME_SEEDS_MAX = 60
"""Within which a bug must be found in its own profile; most need fewer than ten."""
SLOW = (
    "append_before_tables",
    "put_holds_parent",
    "put_renews_parent",
    "settles_last",
    "stat_after_tables",
    "table_before_tail",
    "unsettled_is_a_miss",
    "credits_ignore_the_level",
    "nothing_is_evicted",
)
MUTANTS = ("f1-move-makes-the-folder", "g4-no-grace", "h1-condemned-is-a-hit", "h3-sweep-forgets-nothing")
"""Mutants that are found fast. ``make sim-mutants`` looks for all of them."""


def test_nothing_breaks_in_a_few_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(16) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


def test_nothing_breaks_on_one_host_in_a_few_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(4) if (outcome := run(seed, profile=ONE_HOST)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --profile one_host --trace"


@pytest.mark.parametrize("bug", FAST)
def test_a_bug_of_one_host_is_found(bug: str) -> None:
    outcome = first_to_find(BUGS[bug], range(8), ONE_HOST)
    assert outcome, f"{bug} breaks nothing"


@pytest.mark.parametrize("name", [profile.name for profile in CAPACITY_PROFILES])
def test_a_full_root_stays_within_its_capacity(name: str) -> None:
    broken = [(seed, outcome.violation) for seed in range(4) if (outcome := run(seed, profile=BY_NAME[name])).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --profile {name} --trace"


@pytest.mark.slow
def test_nothing_breaks_in_many_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(20_000, 20_060) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


@pytest.mark.slow
@pytest.mark.parametrize("bug", SLOW)
def test_a_planted_bug_is_found(bug: str) -> None:
    outcome = first_to_find(BUGS[bug], range(HOME_SEEDS_MAX), BY_NAME[BUG_HOMES[bug]])
    assert outcome, f"{bug} breaks nothing in {HOME_SEEDS_MAX} seeds of {BUG_HOMES[bug]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    assert first_to_find_mutant(name, HOME_SEEDS_MAX), f"{name} breaks nothing in {HOME_SEEDS_MAX} seeds"


@for_each("bug", sorted(BUGS))
def test_a_bug_can_be_planted(bug: str) -> None:
    """Most are looked for in slow tests alone, which nobody runs for a new name in the code."""
    with BUGS[bug]():
        pass


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
