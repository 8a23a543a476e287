"""Bugs to plant: each drops one rule of gc/PROTOCOL.md from the real code, and the simulation must find it.

A simulation that finds nothing may simply not look; these show where it looks. Each is a context in which the code is
broken; the files ``bugs_*.py`` sort them by what they break.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.sim import bugs_capacity, bugs_etcd, bugs_fence, bugs_folder, bugs_nodes, bugs_pins, bugs_sweeps
from tests.sim.planting import BUGS, HOMES, Bug

__all__ = ["BUGS", "HOMES", "SEEDS_MAX", "SHOWN_BY", "Bug", "planted"]

PARTS = (bugs_nodes, bugs_pins, bugs_sweeps, bugs_fence, bugs_etcd, bugs_folder, bugs_capacity)
"""The modules whose import fills the table."""

SEEDS_MAX = 300
"""Within which every bug must be found, over the mix of profiles, but those that are shown otherwise."""
SHOWN_BY = {
    "abandon_final": "tests/gc/test_hostile.py, two tests of G8",
    "announce_unchained": "tests/node/test_follower.py::test_a3_nothing_is_announced_when_the_chain_has_gone_on",
    "close_compares_first": "tests/gc/test_races.py::test_g6_of_several_sweeps_each_must_be_the_one_that_was_reaped",
    "condemn_compares_first": "tests/gc/test_races.py::test_g2_of_several_shards_each_must_be_free",
    "fence_drains": "tests/gc/test_races.py::test_f3_a_folder_that_is_named_after_all_keeps_what_is_in_it",
    "grace_stale_read": "tests/gc/test_races.py::test_g4_a_session_that_begins_before_the_sweep_is_waited_for",
    "lost_watch_keeps_births": "tests/node/test_follower.py::test_v3_after_a_lost_watch_a_hold_is_older_than_all",
    "pin_outlives_hold": "tests/node/test_pins.py::test_p1_the_hold_outlives_the_put_or_there_is_no_pin",
    "own_list": "tests/gc/test_races.py::test_o1_every_run_deletes_from_the_list_that_was_made_final",
    "pin_no_session": "tests/meta/test_pins.py::test_p2_a_pin_is_put_only_while_the_session_s_key_is_as_last_written",
    "pin_without_proof": "tests/meta/test_meta_nouns.py, two tests of P3",
    "pin_drops_held": "tests/node/test_follower_rules.py, a test of A2",
    "refs_before_condemn": "tests/gc/test_rules.py::test_g4_a_pin_put_until_the_grace_is_over_is_spared",
    "refs_before_grace": "tests/gc/test_rules.py::test_g4_a_pin_put_until_the_grace_is_over_is_spared",
    "split_read": "tests/gc/test_races.py::test_c3_what_was_read_in_the_lost_timeline_ends_no_grace",
    "look_outlives_log": "tests/node/test_known.py, tests of looks that an event overtakes",
    "pin_holds": "tests/model/host.py, world pin",
    "put_settles": "tests/model/host.py, world put",
    "tables_before_pins": "tests/model/host.py, the rule of that name",
    "takeover_settles": "tests/model/host.py, the rule of that name",
    "view_before_session": "tests/gc/test_races.py::test_v1_the_session_is_there_before_the_view_is_read",
}
"""Bugs that the simulation does not find for certain within that: a race of many steps, or another rule hides it."""


@contextmanager
def planted(*names: str) -> Iterator[None]:
    """Several bugs at once."""
    with ExitStack() as undo:
        for name in names:
            undo.enter_context(BUGS[name]())
        yield
