"""Mutants of the vLLM connector: whose KV may be shared, and who waits for whom. Rules: kvstore/connectors/README.md."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, replace

ADAPTERS = "connectors/test_vllm_adapters.py::test_"
SCHEDULER = "connectors/test_vllm_scheduler.py::test_"
GROUPS = "connectors/test_vllm_groups.py::test_"
SESSIONS = "kvstore.connectors.sessions:Sessions"
EVENTS = "kvstore.connectors.vllm.events:Events"
LOOKS = "kvstore.connectors.vllm.adapters:Adapters"


def adapter(name: str, planter: Planter, *tests: str) -> Mutant:
    """A row of: what vLLM may have loaded otherwise is not shared."""
    return mutant(f"vllm-adapter-{name}", "CONNECTORS LoRA adapters", planter, *(f"{ADAPTERS}{test}" for test in tests))


def kind(name: str, place: str, old: str, new: str, *tests: str) -> Mutant:
    """A row of: of each kind of KV what hits need is stored and asked for, and no more."""
    return mutant(
        f"vllm-{name}",
        "CONNECTORS Models with several kinds of KV",
        edit(f"kvstore.connectors.vllm.{place}", old, new),
        *(f"{GROUPS}{test}" for test in tests),
    )


def event(name: str, planter: Planter, test: str) -> Mutant:
    """A row of: an event tells what the store has, and only that."""
    return mutant(f"vllm-event-{name}", "CONNECTORS Events", planter, f"connectors/test_vllm_events.py::test_{test}")


def branch(name: str, planter: Planter, test: str, *more: str) -> Mutant:
    """A row of: a session's branch is superseded only if it has abandoned it and nobody else has it."""
    return mutant(f"vllm-branch-{name}", "CONNECTORS Sessions", planter, f"connectors/{test}", *more)


PINNED = [
    mutant(
        "vllm-pin-before-it-is-stored",
        "CONNECTORS Hints: pins once the blocks are stored",
        replace("kvstore.connectors.vllm.pinning:Pinning._await_stored", lambda self, cache, keys, until_s: None),
        "connectors/test_vllm_pinning.py::test_a_pin_waits_for_blocks_on_their_way_but_no_request_does",
    ),
    mutant(
        "vllm-pin-of-a-name-twice",
        "CONNECTORS Hints: a later pin of the name replaces it",
        edit("kvstore.connectors.vllm.pinning:Pinning._keep", "_release(name, before)", "pass"),
        "connectors/test_vllm_pinning.py::test_a_name_that_is_pinned_again_keeps_its_last_pin_alone",
    ),
    mutant(
        "vllm-unpin-overtakes-its-pin",
        "CONNECTORS Hints: an unpin ends the pins before it",
        edit("kvstore.connectors.vllm.pinning:Pinning._submit", "crc32(name.encode())", "(task.func == self._pin)"),
        "connectors/test_vllm_pinning.py::test_an_unpin_ends_the_pin_before_it_that_still_waits_for_blocks",
    ),
    mutant(
        "pin-of-blocks-that-are-missing",
        "PROTOCOL P1: blocks that are there are pinned",
        edit("kvstore.node.member:Member.pin_blocks", "if found", "if not found"),
        "contract/test_transport.py::test_blocks_are_pinned_listed_and_released[local]",
    ),
]

BRANCHES = [
    branch(
        "that-another-session-shares",
        edit(f"{SESSIONS}._kept", "if not each.is_abandoned", "if each is lost"),
        "test_sessions.py::test_what_another_live_session_has_is_not_abandoned",
        "connectors/test_vllm_branches.py::test_what_another_session_or_a_running_request_shares_is_left_alone",
    ),
    branch(
        "that-a-running-request-has",
        edit(f"{SESSIONS}.ended", "list(running) if lost else []", "[]"),
        "test_sessions.py::test_what_a_running_request_has_is_not_abandoned",
    ),
    branch(
        "left-at-once",
        edit(f"{SESSIONS}._took", "if supersede:", "if supersede is not False:"),
        "test_sessions.py::test_a_session_that_begins_another_branch_abandons_nothing",
    ),
    branch(
        "guessed-about-for-ever",
        edit(f"{SESSIONS}._took", "or session.goes_on_apart", ""),
        "test_sessions.py::test_a_session_that_uses_what_it_seemed_to_have_left_is_not_guessed_about_any_more",
    ),
    branch(
        "whose-requests-say-that-it-stays",
        edit(f"{SESSIONS}._took", "if not each.stays", "if True"),
        "test_sessions.py::test_a_request_can_say_that_all_stay_and_itself_for_good",
    ),
    branch(
        "head-and-not-its-tail",
        edit(
            "kvstore.connectors.vllm.branches:Branches._supersede",
            "whole, self._runs.known_tokens(named)",
            "0, whole",
        ),
        "test_vllm_branches.py::test_a_session_that_returns_supersedes_the_fork_behind_what_both_share",
    ),
    branch(
        "part-of-a-block",
        edit("kvstore.connectors.vllm.branches:Branches._supersede", "-(-first // cluster", "(first // cluster"),
        "test_vllm_branches.py::test_every_kind_of_kv_is_told_in_whole_blocks",
    ),
    branch(
        "sessions-unbounded",
        edit(f"{SESSIONS}._bound", "or self._blocks > self._blocks_max", ""),
        "test_sessions.py::test_branches_sessions_and_blocks_are_bounded",
    ),
]

MUTANTS = [
    *BRANCHES,
    *PINNED,
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
    kind(
        "window-one-block-short",
        "groups:Cluster.first_block",
        "boundary - self.reach_tokens + 1",
        "boundary - self.reach_tokens + 1 + self.block_tokens",
        "a_hit_needs_the_blocks_that_the_next_token_sees",
    ),
    kind(
        "windows-stored-everywhere",
        "groups:Boundaries.next",
        "self.apart if tokens <= end else self.unit",
        "self.unit",
        "windows_beside_one_full_layer_take_two_fifths_of_the_bytes",
    ),
    kind(
        "parting-not-stored",
        "groups:Boundaries.next",
        "(parting, (prompt_tokens",
        "(0, (prompt_tokens",
        "where_a_prompt_parts_from_a_stored_one_the_next_one_finds_a_window",
    ),
    kind(
        "parting-of-the-engine-not-stored",
        "runs:Runs.stores",
        "ends.is_parting and cluster.kind is Kind.WINDOW",
        "False",
        "what_the_engine_has_itself_where_a_prompt_parts_is_stored_once",
    ),
    kind(
        "hit-without-its-tail",
        "groups:_is_whole",
        "all(known",
        "any(known",
        "the_last_boundary_is_the_one_that_trying_all_finds",
    ),
    kind(
        "state-within-a-block",
        "runs:Runs.states",
        " and boundary % cluster.block_tokens == 0",
        "",
        "a_state_is_stored_where_vllm_says_and_a_hit_ends_at_one",
    ),
    kind(
        "state-that-was-loaded-stored-again",
        "runs:Runs.states",
        "computed < boundary <= end",
        "boundary <= end",
        "a_state_is_stored_where_vllm_says_and_a_hit_ends_at_one",
    ),
    kind(
        "avoided-tail-asked-for",
        "scheduler:SchedulerHalf._tails",
        "None if self._avoided.get(key, 0.0) > now else key",
        "key",
        "a_state_that_could_not_be_loaded_is_passed_over",
    ),
    kind(
        "load-into-a-part-of-a-block",
        "scheduler:SchedulerHalf.matched_tokens",
        "lookup.tails and computed_tokens % self._unit",
        "False",
        "a_hit_of_vllm_within_a_block_gets_no_state_of_another",
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
        "of-a-missed-window",
        edit(
            "kvstore.connectors.vllm.lookups:Lookup.missed", "max(found.from_asked, found.shared)", "found.from_asked"
        ),
        "a_look_up_that_misses_a_window_alone_tells_no_removal",
    ),
    mutant(
        "vllm-descent-of-keys-of-its-own",
        "CONNECTORS Events",
        edit(
            "kvstore.connectors.vllm.scheduler:SchedulerHalf._to_store",
            "None if self._era else self._descents",
            "self._descents",
        ),
        "connectors/test_vllm_scheduler.py::test_blocks_that_only_this_engine_can_find_say_nothing",
    ),
    mutant(
        "vllm-descent-of-another-block",
        "CONNECTORS Events",
        edit(
            "kvstore.connectors.vllm.messages:Run.picked",
            "[self.descents[at] for at in offsets] if self.descents else []",
            "self.descents[: len(offsets)]",
        ),
        "connectors/test_vllm_storing.py::test_what_a_file_says_stays_with_its_block_when_others_are_left_out",
    ),
    event(
        "of-windows",
        edit("kvstore.connectors.vllm.described:Describer.blocks", "cluster.kind is not Kind.FULL", "False"),
        "of_several_kinds_of_kv_full_attention_is_told_once_for_its_first_group",
    ),
    event(
        "of-the-first-group-of-all",
        edit(f"{EVENTS}._stored", "group_idx=cluster.groups[0]", "group_idx=origin.cluster"),
        "of_several_kinds_of_kv_full_attention_is_told_once_for_its_first_group",
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
        "vllm-event-one-part-counts-as-stored",
        "CONNECTORS Events",
        edit("kvstore.connectors.vllm.storing:Storer._publish", "all(each) for", "any(each) for"),
        "connectors/test_vllm_storing.py::test_a_block_is_stored_if_all_of_its_parts_are",
    ),
    mutant(
        "vllm-tier-event-of-what-failed",
        "CONNECTORS Events",
        edit("kvstore.connectors.vllm_tier:KVStoreTier._end", "failed if job.is_promotion else good", "keys"),
        "connectors/test_vllm_tier.py::test_chunks_that_were_stored_are_told_and_those_that_could_not_be_loaded_as_removed",
    ),
    mutant(
        "vllm-tier-chunks-in-the-order-of-the-job",
        "CONNECTORS Tier",
        edit("kvstore.connectors.vllm_tier:_runs", "key=places.__getitem__", "key=int"),
        "connectors/test_vllm_tier.py::test_chunks_are_stored_at_their_places_in_the_prompt_though_vllm_gives_them_in_no_order",
    ),
]
