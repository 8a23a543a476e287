"""Mutants of the vLLM connector: whose KV may be shared, and who waits for whom. Rules: kvstore/connectors/README.md."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, replace

ADAPTERS = "connectors/test_vllm_adapters.py::test_"
SCHEDULER = "connectors/test_vllm_scheduler.py::test_"
LOOKS = "kvstore.connectors.vllm.adapters:Adapters"


def adapter(name: str, planter: Planter, *tests: str) -> Mutant:
    """A row of: what vLLM may have loaded otherwise is not shared."""
    return mutant(f"vllm-adapter-{name}", "CONNECTORS LoRA adapters", planter, *(f"{ADAPTERS}{test}" for test in tests))


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
            "kvstore.connectors.vllm.scheduler:SchedulerHalf._named", "self._era + tracked.adapter.digest", "self._era"
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
]
