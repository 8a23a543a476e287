"""The protocol's rules against every interleaving: they suffice, and each of them is needed.

The search depends on nothing outside this folder, so the suite runs what takes about a second each.  CI runs every
mutation (`make model ARGS=--quick`), `make model` every world as well.
"""

from __future__ import annotations

import pytest

from tests.model import host
from tests.model.check import EXPECTED, check
from tests.model.mutations import MUTATIONS

SLOWER_MUTATIONS = {
    *("cache/cache_not_evicted", "cache/cache_unchecked", "looks/look_outlives_event", "looks/forgets_condemned_only"),
    *("deposed/no_fence+no_unlisted", "deposed/close_before_fence+no_unlisted", "deposed/late_mkdir+no_unlisted"),
    *("deposed/close_blind+no_unlisted", "deposed/fence_drains", "s3/own_list", "aside/strict_after_damage"),
    *("twoa/condemn_compares_first", "two3/close_compares_first", "two13/no_seq_chain", "c13d/no_seq_chain"),
    *("two13v/lost_watch_keeps_births", "two13v/lost_watch_no_key_check"),
    *("c13v/lost_watch_keeps_births", "c13v/lost_watch_no_key_check"),
    *("c13p/no_chain", "c13p/no_key_chain", "c13p/no_reread", "c13p/split_read"),
}


@pytest.mark.parametrize("world", ["hold", "join", "two"])
def test_the_rules_suffice(world: str) -> None:
    """I1 to I4 in every state, and I5 from every state: with nodes that cooperate, and with leases that only end."""
    checked = check(world)
    assert checked.broken is None, f"{checked.why}: {' > '.join(checked.trace)}"
    assert checked.states_count > 2_000, "a search that ends early shows nothing"


@pytest.mark.parametrize("name", [mutation.name for mutation in MUTATIONS if mutation.name not in SLOWER_MUTATIONS])
def test_a_dropped_rule_is_found(name: str) -> None:
    checked = check(name)
    assert checked.broken == EXPECTED[name], f"{checked.why}: {' > '.join(checked.trace)}"


@pytest.mark.parametrize("world", ["pin", "match", "overrun"])
def test_host_rules_suffice(world: str) -> None:
    found = host.search(world)
    assert not found.broken, " > ".join(found.trace)
    assert found.states_count > 1_000, "a search that ends early shows nothing"


def test_host_rule_dropped_is_found() -> None:
    found = {rule: host.search(world, rule).broken for rule, world in host.DROPPED.items() if world != "put"}
    assert all(found.values()), found


def test_a_trace_can_be_followed_from_the_beginning() -> None:
    trace = check("hold/no_grace").trace
    assert len(trace) == 8
    assert trace[-1] == "g0.rename(i1->trash)"
