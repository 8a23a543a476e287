"""Mutants of the vLLM connector: whose KV may be shared, and who waits for whom. Rules: kvstore/connectors/README.md."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, replace

ADAPTERS = "connectors/test_vllm_adapters.py::test_"
SCHEDULER = "connectors/test_vllm_scheduler.py::test_"
EVENTS = "kvstore.connectors.vllm.events:Events"
LOOKS = "kvstore.connectors.vllm.adapters:Adapters"


def adapter(name: str, planter: Planter, *tests: str) -> Mutant:
    """A row of: what vLLM may have loaded otherwise is not shared."""
    return mutant(f"vllm-adapter-{name}", "CONNECTORS LoRA adapters", planter, *(f"{ADAPTERS}{test}" for test in tests))


def event(name: str, planter: Planter, test: str) -> Mutant:
    """A row of: an event tells what the store has, and only that."""
    return mutant(f"vllm-event-{name}", "CONNECTORS Events", planter, f"connectors/test_vllm_events.py::test_{test}")


MUTANTS = [
    adapter(
        "younger-than-the-engine",
        edit(f"{LOOKS}._serve", "seal.changed_ns > self._started_ns", "0 > self._started_ns"),
        "files_that_changed_after_the_engine_started_share_nothing",
    ),
    adapter(
        "number-of-two",
        edit(f"{LOOKS}.begin", "self._paths.setdefault(number, path) != path", "False"),
        "a_number_that_two_adapters_had_shares_nothing",
    ),
    adapter(
        "settings-not-hashed",
        edit(f"{LOOKS}._digest", "told + settings", "told"),
        "the_digest_is_that_of_the_content_wherever_it_lies",
    ),
    adapter(
        "seal-always-holds",
        replace("kvstore.connectors.vllm.adapters:Seal.holds", lambda self: True),
        "a_seal_breaks_with_any_change",
    ),
    adapter(
        "not-in-the-keys",
        edit(
            "kvstore.connectors.vllm.scheduler:SchedulerHalf._keys", "self._era + tracked.adapter.digest", "self._era"
        ),
        "requests_share_with_those_of_the_same_files_only",
    ),
    adapter(
        "stored-before-it-is-known",
        edit(
            "kvstore.connectors.vllm.scheduler:SchedulerHalf._to_store",
            "tracked.adapter is not None and seal is None",
            "False",
        ),
        "an_adapter_that_takes_long_to_look_at_is_not_waited_for",
    ),
    mutant(
        "vllm-load-never-ends-for-others",
        "CONNECTORS Loads",
        replace("kvstore.connectors.vllm.scheduler:SchedulerHalf._loaded", lambda self, tracked: None),
        f"{SCHEDULER}what_one_request_loads_another_waits_for[it is gone]",
    ),
    event(
        "before-all-parts",
        edit(f"{EVENTS}.learn", "block.parts == self._all_parts", "True"),
        "a_block_is_told_when_every_rank_has_stored_its_part",
    ),
    event(
        "of-what-was-not-stored",
        edit(f"{EVENTS}.learn", "self._pending.pop(key, None)", "pass"),
        "what_a_rank_could_not_store_is_not_told_until_it_is_stored_again",
    ),
    event(
        "no-removal",
        edit(f"{EVENTS}.learn", "for keys in report.failed.values()", "for keys in ()"),
        "what_is_loaded_is_told_and_what_could_not_be_is_told_as_removed",
    ),
    event(
        "of-what-is-gone-stays",
        replace("kvstore.connectors.vllm.lookups:Lookup.missed", lambda self, found: ()),
        "a_look_up_that_misses_what_was_told_tells_it_as_removed_once",
    ),
    event(
        "of-two-requests-in-one",
        replace("kvstore.connectors.vllm.events:_Run.takes", lambda self, block: True),
        "blocks_of_two_requests_are_two_events",
    ),
    event(
        "unbounded",
        edit(f"{EVENTS}.ordered", "len(self._pending) > PENDING_MAX", "False"),
        "what_waits_to_be_told_is_bounded",
    ),
    event(
        "steps-for-ever",
        edit(f"{EVENTS}.is_pending", "and self._clock() < self._pending_until_s", ""),
        "an_idle_engine_goes_on_for_a_moment_to_tell_and_no_longer",
    ),
    mutant(
        "vllm-event-shed-counts-as-stored",
        "CONNECTORS Events",
        edit("kvstore.connectors.vllm.storing:Storer._admit", "self._settle(keys, [False] * len(keys))", "pass"),
        "connectors/test_vllm_storing.py::test_blocks_that_find_no_room_are_settled_as_not_stored",
    ),
    mutant(
        "vllm-tier-event-of-what-failed",
        "CONNECTORS Events",
        edit("kvstore.connectors.vllm_tier:KVStoreTier._end", "failed if job.is_promotion else good", "keys"),
        "connectors/test_vllm_tier.py::test_chunks_that_were_stored_are_told_and_those_that_could_not_be_loaded_as_removed",
    ),
]
