"""The simulation as a test: real nodes and collectors keep their promises, and broken ones are caught."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.bugs import BUGS
from tests.sim.run import run

SEEDS_MAX = 1000
"""Within which a planted bug must be found."""
PLANTED = (
    "announce_unseen",
    "announce_while_holding",
    "cache_not_evicted",
    "close_blind",
    "close_before_fence",
    "condemn_blind",
    "late_mkdir",
    "match_ignores_condemned",
    "no_fence",
    "no_grace",
    "no_incarnation_check",
    "pin_without_hold",
    "publish_replaces",
    "refs_before_grace",
    "rejoin_keeps_holds",
    "set_aside_deletes",
)


def test_nothing_breaks_in_a_few_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(60) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


@pytest.mark.slow
def test_nothing_breaks_in_many_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(20_000, 20_200) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    found = next((seed for seed in range(SEEDS_MAX) if run(seed, bug=BUGS[bug]).violation), None)
    assert found is not None, f"{bug} breaks nothing in {SEEDS_MAX} seeds"
    print(f"{bug}: seed {found}")


def test_a_seed_gives_the_same_run_every_time() -> None:
    """Also in another process, where hashes of bytes are salted otherwise."""
    first = [run(seed).digest for seed in (1, 2, 3)]
    program = "from tests.sim.run import run; print([run(seed).digest for seed in (1, 2, 3)])"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == str(first)
