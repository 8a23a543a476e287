"""Mutants of events: what is told, when, by whom, and to whom. Rules: kvstore/events/EVENTS.md."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, skip

MODEL = "events/test_inventory.py::test_the_differences_add_up_to_what_match_would_find"
TRUTH = "events/test_truth.py::test_"
SPEAKER = "events/test_speaker.py::test_"
BLOCKS = "events/test_blocks.py::test_"
PARTS = "events/test_parts.py::test_"
ON = "[memory]"


def events(name: str, rule: str, planter: Planter, test: str = MODEL) -> Mutant:
    """A row of a rule of EVENTS.md."""
    return mutant(f"events-{name}", f"EVENTS {rule}", planter, test)


OF_BLOCKS = [
    events(
        "believes-keys",
        "T4",
        edit("kvstore.events.claims:claimed_of", "block_address(namespace, key) != address", "False"),
        f"{BLOCKS}a_key_that_does_not_give_the_name_of_its_file_is_not_told{ON}",
    ),
    events(
        "believes-depths",
        "T4",
        edit("kvstore.events.inventory:Inventory._tell", "(depths[above] + 1 == depths[level])", "(above == above)"),
        f"{BLOCKS}claims_of_circles_and_of_other_depths_are_not_told{ON}",
    ),
    events(
        "believes-sizes",
        "T4",
        edit("kvstore.format.descent:read_descent", "min(DESCENT_BYTES_MAX, size - 8 - at - _SIZE.size)", "1 << 40"),
        "format/test_descent.py::test_a_size_that_cannot_be_is_no_descent",
    ),
    events(
        "believes-texts",
        "T4",
        edit("kvstore.events.claims:_is_text", "except UnicodeEncodeError", "except ZeroDivisionError"),
        f"{BLOCKS}a_file_that_says_nothing_of_use_is_not_told_and_hides_what_is_behind_it",
    ),
    events(
        "keeps-old-claims",
        "T4",
        edit("kvstore.events.inventory:Inventory.settle", "gone[self.rows.has(gone, BLOCK)]", "gone[:0]"),
        f"{BLOCKS}a_block_that_comes_again_is_told_as_its_new_file_says{ON}",
    ),
    events(
        "mixes-adapters",
        "S3",
        edit("kvstore.events.messages:_chains", "inventory.rows.origins(rows).tolist()", "[0] * len(rows)"),
        f"{BLOCKS}a_block_with_another_adapter_than_its_parent_begins_an_event{ON}",
    ),
    events(
        "tells-parts",
        "T5",
        edit("kvstore.events.inventory:Inventory._eligible", "CONDEMNED | LACKING", "CONDEMNED"),
        f"{PARTS}a_block_is_told_once_all_parts_are_there_and_removed_with_the_first_that_goes{ON}",
    ),
    events(
        "counts-condemned-parts",
        "T5",
        edit("kvstore.events.inventory:Inventory.has_part", "ELIGIBLE | CONDEMNED", "ELIGIBLE"),
        f"{PARTS}a_part_that_is_condemned_is_missing{ON}",
    ),
    events(
        "any-number-of-parts",
        "T5",
        edit("kvstore.events.wholes:Wholes.judge", "{*counts.values()} == {len(members)}", "True"),
        f"{PARTS}more_or_fewer_namespaces_than_parts_tell_nothing",
    ),
    events(
        "members-for-ever",
        "T5",
        edit("kvstore.events.wholes:Wholes.judge", "self._members.get(known) != counts.keys()", "False"),
        f"{PARTS}a_namespace_too_many_takes_back_what_was_told{ON}",
    ),
]

MUTANTS = [
    *OF_BLOCKS,
    events(
        "tells-orphans",
        "T1",
        edit(
            "kvstore.events.inventory:Inventory._tell",
            "(above == NO_ROW) | (self.rows.has(above, TOLD)",
            "(above == above) | (self.rows.has(above, TOLD)",
        ),
    ),
    events(
        "tells-condemned",
        "T1",
        edit("kvstore.events.inventory:Inventory._eligible", "ELIGIBLE | CONDEMNED | LACKING", "ELIGIBLE | LACKING"),
    ),
    events(
        "tells-the-unknown",
        "T1",
        edit(
            "kvstore.events.inventory:Inventory._eligible",
            "(ELIGIBLE | CONDEMNED | LACKING) == ELIGIBLE",
            "(PRESENT | CONDEMNED) == PRESENT",
        ),
        "events/test_inventory.py::test_a_chunk_whose_identity_is_unknown_is_not_told",
    ),
    events(
        "forgets-who-waits",
        "T1",
        edit("kvstore.events.inventory:Inventory.settle", "[self._waiting, cut_off, touched]", "[cut_off, touched]"),
    ),
    events(
        "keeps-what-is-cut-off",
        "T2",
        edit(
            "kvstore.events.inventory:Inventory.settle", "len(removed) and self.rows.children[removed].any()", "False"
        ),
    ),
    events(
        "listing-clears-all",
        "L1",
        edit(
            "kvstore.events.inventory:Inventory.listed",
            "self.rows.between(first, last)",
            "self.rows.between(0, KEY_MAX)",
        ),
        "events/test_inventory.py::test_a_listing_of_a_part_takes_nothing_from_the_other_parts",
    ),
    events(
        "compacts-parents-away",
        "T2",
        edit("kvstore.events.inventory:Inventory.compact", "np.union1d(alive, above[above != NO_ROW])", "alive"),
        "events/test_inventory.py::test_compacting_forgets_what_is_gone_and_keeps_what_is_told",
    ),
    events(
        "loses-small-tables",
        "T1",
        edit("kvstore.events.table:Table.add", "_merged(self._large, *self._small)", "self._small"),
        "events/test_inventory.py::test_the_table_finds_what_was_added_across_merges",
    ),
    events(
        "believes-headers",
        "T3",
        edit(
            "kvstore.events.identities:_identity",
            "chunk_address(namespace.digest, fixed.parent, tokens) != address",
            "False",
        ),
        f"{TRUTH}a_file_that_is_not_what_its_name_says_is_never_told{ON}",
    ),
    events(
        "ignores-sweeps",
        "L2",
        skip("kvstore.events.truth:Truth._condemn"),
        f"{TRUTH}a_removal_is_told_before_the_file_goes{ON}",
    ),
    events(
        "never-spares",
        "L1",
        edit("kvstore.events.inventory:Inventory.listed", "self.rows.unmark(spared, CONDEMNED)", "pass"),
        f"{TRUTH}what_a_sweep_spares_is_told_again{ON}",
    ),
    events(
        "ignores-clears",
        "L2",
        skip("kvstore.events.truth:Truth._hide"),
        f"{TRUTH}a_clear_is_told_before_it_deletes_and_what_it_spares_again{ON}",
    ),
    events(
        "clear-never-ends",
        "L1",
        edit("kvstore.events.truth:Truth._apply", "news.clear_ended", "False"),
        f"{TRUTH}what_a_clear_spares_is_told_again_where_it_deleted_nothing",
    ),
    events(
        "ignores-quarantine",
        "section 3",
        skip("kvstore.events.truth:Truth._look_at_quarantine"),
        f"{TRUTH}a_damaged_chunk_is_taken_back_once_it_is_set_aside[files]",
    ),
    events(
        "lists-once",
        "L3",
        edit("kvstore.events.folders:Folders.due", "(self._listed_s < settled_s) & (now_s >= settled_s)", "False"),
        f"{TRUTH}a_folder_whose_time_changed_is_listed_twice_and_then_left_alone",
    ),
    events(
        "lists-all-the-time",
        "L5",
        edit("kvstore.events.folders:Folders.due", "self._credit(now_s) <= 0", "False"),
        f"{TRUTH}listings_take_their_share_of_the_time_and_no_more",
    ),
    events(
        "forgets-lost-sweeps",
        "L6",
        edit("kvstore.events.doomed:Doomed._begin", "before - there", "set()"),
        f"{TRUTH}a_lost_watch_loses_nothing{ON}",
    ),
    events(
        "tells-unwanted",
        "S2",
        edit("kvstore.events.truth:Truth._meet", "self._wanted(namespace)", "True"),
        f"{TRUTH}only_wanted_namespaces_are_told{ON}",
    ),
    events(
        "filter-misses",
        "L2",
        edit("kvstore.meta.sweeps:Members.among", ".all(axis=1)", "[:, 0] & False"),
        f"{TRUTH}a_filter_condemns_for_events_what_it_condemns_for_nodes",
    ),
    events(
        "terms-restart",
        "S4",
        edit("kvstore.events.stream:Stream.__init__", "term << TERM_BITS", "1"),
        f"{SPEAKER}numbers_have_no_gaps_and_begin_above_those_of_earlier_speakers{ON}",
    ),
    events(
        "silent-heart",
        "S5",
        skip("kvstore.events.speaker:Speaker._beat"),
        f"{SPEAKER}silence_is_broken_by_empty_batches{ON}",
    ),
    events(
        "no-marker",
        "S6",
        edit("kvstore.events.speaker:Speaker._stream_of", "[messages.cleared()]", "[]"),
        f"{SPEAKER}of_two_publishers_one_speaks_and_the_other_goes_on{ON}",
    ),
    events(
        "replays-with-a-hole",
        "S7",
        edit("kvstore.events.stream:Stream.since", "not self._kept[0].seq <= seq <= self._next", "False"),
        f"{SPEAKER}a_replay_of_another_speakers_numbers_is_a_snapshot",
    ),
    events(
        "keeps-all-batches",
        "S7",
        edit("kvstore.events.stream:Stream.add", "self._kept_bytes > self._limits.replay_bytes", "False"),
        f"{SPEAKER}batches_kept_for_replay_are_bounded_by_bytes",
    ),
    events(
        "topics-mix",
        "S2",
        edit("kvstore.events.opening:Told.topic", '(f".{namespace.tenant}" if namespace.tenant else "")', '""'),
        f"{SPEAKER}topics_keep_tenants_apart",
    ),
    events(
        "two-speak",
        "F1",
        edit("kvstore.events.fence:Fence._stand", "found.value == self._value and found.lease == self._lease", "True"),
        f"{SPEAKER}of_two_publishers_one_speaks_and_the_other_goes_on{ON}",
    ),
    events(
        "speaks-past-its-lease",
        "F2",
        edit(
            "kvstore.events.fence:Fence.term",
            "self._clock.monotonic_s() < self._heard_s + self._limits.lease_s",
            "True",
        ),
        f"{SPEAKER}a_speaker_that_was_stopped_past_its_lease_says_nothing_more{ON}",
    ),
    events(
        "goes-on-as-before",
        "F3",
        edit("kvstore.events.speaker:Speaker.step", "term != self._term", "not self._term"),
        f"{SPEAKER}a_speaker_that_is_elected_again_tells_everything_again{ON}",
    ),
    events(
        "another-format",
        "S1",
        edit("kvstore.events.messages:_stored", '"lora_id": None,', ""),
        "events/test_wire.py::test_a_batch_has_the_bytes_that_vllm_sends",
    ),
    events(
        "a-failing-root-ends-it",
        "F2",
        edit(
            "kvstore.events.speaker:Speaker.step", "except KVStoreError as error", "except ZeroDivisionError as error"
        ),
        f"{SPEAKER}a_root_that_does_not_answer_silences_nobody",
    ),
    events(
        "questions-cross-tenants",
        "section 7",
        edit(
            "kvstore.events.query:Answers.answer",
            "(model.namespace.name, model.namespace.tenant)",
            "(model.namespace.name, question.tenant)",
        ),
        "events/test_query.py::test_a_tenant_sees_nothing_of_another",
    ),
    events(
        "questions-skip-holes",
        "T1",
        edit("kvstore.events.query:_leading_chain", "count * step", "len(ends) * step"),
        "events/test_query.py::test_the_longest_prefix_is_found_by_tokens_and_by_hashes",
    ),
    events(
        "questions-answer-what-was",
        "T7",
        edit(
            "kvstore.events.spelling:Spellings.find",
            "rows[known[self._is_old(firsts[known], rows[known])]] = NO_ROW",
            "pass",
        ),
        "events/test_spelling.py::test_a_block_that_comes_again_with_other_tokens_answers_to_those_alone[memory]",
    ),
    events(
        "questions-find-adapters",
        "T7",
        edit("kvstore.events.names:Names.plain", "self._origins[origin].lora_name is None", "True"),
        "events/test_spelling.py::test_what_tokens_alone_do_not_lead_to_is_not_found_by_them[memory]",
    ),
    events(
        "questions-find-what-is-not-told",
        "T7",
        skip("kvstore.events.columns:Columns.forget_spelled"),
        "events/test_spelling.py::test_blocks_are_spelled_some_at_a_time_and_meanwhile_too_little_is_answered[memory]",
    ),
    events(
        "everybody-asks",
        "section 7",
        skip("kvstore.events.web:_admit"),
        "events/test_query.py::test_a_token_that_may_not_read_the_tenant_is_refused",
    ),
    events(
        "strangers-hear",
        "section 7",
        edit("kvstore.events.sockets:Sockets._bound", "curve is not None", "False"),
        "events/test_sockets.py::test_with_curve_only_known_keys_hear_events",
    ),
    events(
        "others-hear-by-mistake",
        "section 7",
        edit("kvstore.cli.events:Endpoints._bound", 'not is_loopback(endpoint.removeprefix("tcp://"))', "False"),
        "events/test_sockets.py::test_prompts_are_not_served_to_others_by_mistake",
    ),
]
