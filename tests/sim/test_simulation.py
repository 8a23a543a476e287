"""The simulation as a test: real nodes and collectors keep their promises, and broken ones are caught."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kit.cases import for_each
from tests.sim.bugs import BUGS, HOMES
from tests.sim.profiles import BY_NAME, CAPACITY_PROFILES, ONE_HOST
from tests.sim.run import first_to_find, run

FAST = ("log_clears_cache", "overrun_clears_cache", "children_first", "room_is_limited", "reads_pins")
"""The bugs of one host that the first seeds find."""
HOME_SEEDS_MAX = 60
"""Within which a bug must be found in its own profile; most need fewer than ten."""
PLANTED = (
    "announce_past_birth",
    "announce_while_holding",
    "announce_youngest",
    "aside_overwrites",
    "cache_not_evicted",
    "condemn_blind",
    "fixed_trash_name",
    "generation_not_compared",
    "half_event",
    "hold_outlives_session",
    "late_mkdir",
    "lost_watch_keeps_cache",
    "lost_watch_no_key_check",
    "match_ignores_condemned",
    "no_adopt",
    "no_chains",
    "no_fence",
    "no_grace",
    "no_incarnation_check",
    "no_key_chain",
    "no_reread",
    "no_seq_chain",
    "no_start_fence",
    "no_twins",
    "pin_without_hold",
    "publish_replaces",
    "reread_unchecked",
    "session_outlives_ttl",
    "set_aside_deletes",
    "unreadable_session_skipped",
    # Of one host.
    "append_before_tables",
    "put_holds_parent",
    "put_renews_parent",
    "settles_last",
    "stat_after_tables",
    "table_before_tail",
    "unsettled_is_a_miss",
    # Of the capacity.
    "credits_ignore_the_level",
    "nothing_is_evicted",
)
"""The bugs that are found fast. ``make sim-bugs`` looks for all of them, over the mix of profiles."""


def test_nothing_breaks_in_a_few_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(16) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


def test_nothing_breaks_on_one_host_in_a_few_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(4) if (outcome := run(seed, profile=ONE_HOST)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --profile one_host --trace"


@pytest.mark.parametrize("bug", FAST)
def test_a_bug_of_one_host_is_found(bug: str) -> None:
    outcome = first_to_find(BUGS[bug], range(8), ONE_HOST)
    assert outcome, f"{bug} breaks nothing: python -m tests.sim --bugs {bug}"


@pytest.mark.parametrize("name", [profile.name for profile in CAPACITY_PROFILES])
def test_a_full_root_stays_within_its_capacity(name: str) -> None:
    broken = [(seed, outcome.violation) for seed in range(4) if (outcome := run(seed, profile=BY_NAME[name])).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --profile {name} --trace"


@pytest.mark.slow
def test_nothing_breaks_in_many_seeds() -> None:
    broken = [(seed, outcome.violation) for seed in range(20_000, 20_060) if (outcome := run(seed)).violation]
    assert not broken, f"replay one: python -m tests.sim {broken[0][0]} --trace"


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    outcome = first_to_find(BUGS[bug], range(HOME_SEEDS_MAX), BY_NAME[HOMES[bug]])
    assert outcome, f"{bug} breaks nothing in {HOME_SEEDS_MAX} seeds of {HOMES[bug]}: python -m tests.sim --bugs {bug}"


@for_each("bug", sorted(BUGS))
def test_a_bug_can_be_planted(bug: str) -> None:
    """Most are looked for by ``make sim-bugs`` alone, which nobody runs for a new name in the code."""
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
