"""Mutants of segments: finding, rotation, the gate, and what keeps them apart from exact chains. Rules: SEGMENTS.md."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, skip

FINDING = "segments/test_finding.py::test_"
ROTATION = "segments/test_rotation.py::test_s12_"
STORE = "segments/test_segments.py::test_"
FOLLOWING = "segments/test_following.py::test_"
READ = f"{STORE}s12_segments_are_read_into_their_places_with_rotated_keys[local-True]"
CLOSED = f"{STORE}s11_a_verdict_that_does_not_hold_closes_the_gate_that_an_earlier_one_opened[local]"
GATE = "segments/test_gate.py::test_s11_each_bound_closes_the_gate"
APART = f"{STORE}s2_models_rope_settings_and_exact_chains_share_nothing[local]"
REFUSED = "segments/test_rope.py::test_s5_models_whose_keys_cannot_be_moved_are_refused_with_the_reason"


def segments(name: str, rule: str, planter: Planter, test: str) -> Mutant:
    """A row of a rule of SEGMENTS.md."""
    return mutant(f"segments-{name}", f"SEGMENTS {rule}", planter, test)


MUTANTS = [
    segments(
        "read-on-after-the-return",
        "S12",
        edit("kvstore.client.segments:_Reads.end", "self._changed.wait_for(lambda: not self._running)", "pass"),
        f"{STORE}s12_a_read_that_fails_returns_once_no_other_writes",
    ),
    segments(
        "tokens-not-compared",
        "S7",
        edit("kvstore.segments.finding:find_anywhere", "ask(asked)", "[(b - a) // chunk_tokens for a, b in asked]"),
        f"{FINDING}s7_a_window_whose_hash_is_known_is_not_found_unless_its_tokens_are_stored",
    ),
    segments(
        "stops-where-a-prompt-leaves",
        "S8",
        edit("kvstore.segments.finding:find_anywhere", "range(ROUNDS_MAX)", "range(1)"),
        f"{FINDING}s8_a_segment_that_the_prompt_leaves_gives_way_to_the_next",
    ),
    segments(
        "ranges-overlap",
        "S6",
        edit("kvstore.segments.finding:_proposals", "bisect_left(starts, end, at)", "at + 1"),
        f"{FINDING}s8_of_single_chunks_the_search_is_that_of_brute_force",
    ),
    segments(
        "finds-within-the-exact-prefix",
        "S6",
        edit("kvstore.segments.search:Search.given", "if start >= self.after", "if True"),
        f"{STORE}s8_what_begins_before_the_exact_prefix_ends_is_not_found[local]",
    ),
    segments(
        "computes-the-rest-of-a-segment-alone",
        "S3",
        edit("kvstore.segments.finding:missing_given", "range(start, end)", "range(ends.get(start, start), end)"),
        f"{FINDING}s3_a_segment_that_was_not_found_whole_is_computed_from_its_first_token",
    ),
    segments(
        "index-forgets-the-newest",
        "S10",
        edit("kvstore.segments.index:Index._oldest", "argmin", "argmax"),
        f"{FINDING}s10_the_index_is_bounded_and_keeps_what_was_used_last",
    ),
    segments(
        "finds-anywhere-within-the-exact-prefix",
        "S6",
        edit("kvstore.segments.finding:find", "find_anywhere(tokens, search.after,", "find_anywhere(tokens, 0,"),
        f"{STORE}s8_what_begins_before_the_exact_prefix_ends_is_not_found[local]",
    ),
    segments(
        "answers-taken-as-they-come",
        "S6",
        edit("kvstore.client.remote_segments:_matches", "if start < end", "if False and start < end"),
        f"{STORE}s6_an_answer_that_does_not_fit_the_question_ends_there",
    ),
    segments(
        "finds-without-bound",
        "S6",
        edit("kvstore.segments.finding:find_anywhere", "[:room]", ""),
        f"{FINDING}s6_ranges_are_bounded",
    ),
    segments(
        "skips-offsets-between-blocks",
        "S8",
        edit("kvstore.segments.finding:_candidates", " + chunk_tokens - 1]", "]"),
        f"{FINDING}s8_a_prompt_longer_than_a_block_is_searched_at_every_offset",
    ),
    segments(
        "searches-teach-nothing",
        "S10",
        edit("kvstore.segments.finding:find", "if matches:", "if False:"),
        f"{FINDING}s10_a_search_learns_what_it_found_and_keeps_it",
    ),
    segments(
        "puts-teach-nothing",
        "S10",
        skip("kvstore.node.segment_indexes:SegmentIndexes.learn"),
        f"{FOLLOWING}s10_a_root_that_does_not_list_costs_a_wait_and_no_error",
    ),
    segments(
        "listing-takes-first-chunks-alone",
        "S10",
        edit("kvstore.node.segment_lister:SegmentLister._learn", "chunk.depth + 1", "1"),
        f"{FOLLOWING}s10_what_was_stored_before_is_found_by_the_first_search",
    ),
    segments(
        "listing-drops-what-comes-before-its-parent",
        "S10",
        edit("kvstore.node.segment_lister:SegmentLister._learn", "self._waiting = waiting", "self._waiting = []"),
        f"{FOLLOWING}s10_a_chunk_waits_for_its_parent",
    ),
    segments(
        "listing-trusts-a-fresh-folder-time",
        "S10",
        edit("kvstore.node.segment_lister:SegmentLister._list", "before is not None and before[0] == time)", "True)"),
        f"{FOLLOWING}s10_a_folder_is_listed_until_its_time_has_stood",
    ),
    segments(
        "listing-without-bound",
        "S10",
        edit("kvstore.node.segment_lister:SegmentLister._list", "self._count >= CHUNKS_MAX", "False"),
        f"{FOLLOWING}s10_chunks_that_are_followed_are_bounded",
    ),
    segments(
        "listed-once",
        "S10",
        edit("kvstore.node.segment_indexes:SegmentIndexes._next", "if now_s < due_s:", "if self._ended_s > NEVER_S:"),
        f"{FOLLOWING}s10_what_another_node_puts_later_is_found_after_the_next_listing",
    ),
    segments(
        "listed-for-ever",
        "S10",
        edit("kvstore.node.segment_indexes:SegmentIndexes._next", "now_s - each.searched_s <= IDLE_S", "True"),
        f"{FOLLOWING}s10_nothing_is_listed_once_nobody_searches",
    ),
    segments(
        "indexes-without-bound",
        "S10",
        edit("kvstore.node.segment_indexes:SegmentIndexes._of", "> NAMESPACES_MAX", "> 99"),
        f"{FOLLOWING}s10_indexes_are_bounded",
    ),
    segments(
        "search-of-exact-chains",
        "S5",
        edit("kvstore.node.segment_search:find_segments", "not namespace.has_segments", "False"),
        "worker/test_requests.py::test_other_requests_that_are_wrong",
    ),
    segments(
        "search-holds-nothing",
        "S12",
        edit("kvstore.worker.segments:SegmentCalls.find", "if hold is None:", "if True:"),
        "worker/test_foreign.py::test_segments_are_found_and_held_by_one_call",
    ),
    segments(
        "search-keeps-a-hold-of-nothing",
        "S12",
        edit("kvstore.node.segment_search:hold_segments", "if not matches:", "if False:"),
        f"{STORE}s12_what_a_search_finds_is_held_by_the_same_call[local-True]",
    ),
    segments(
        "rotates-from-position-0",
        "S12",
        edit("kvstore.segments.rotation:rotate_planes", "rope.tables(first,", "rope.tables(0,"),
        f"{ROTATION}rotated_keys_are_within_their_bound_of_float64",
    ),
    segments(
        "rotates-to-the-next-position",
        "S12",
        edit("kvstore.segments.rotation:rotate_planes", "rope.tables(first,", "rope.tables(first + 1,"),
        f"{ROTATION}rotated_keys_are_within_their_bound_of_float64",
    ),
    segments(
        "begins-each-part-of-the-tables-at-its-first-row",
        "S12",
        edit("kvstore.segments.rope:Rope._parts", "slice(at - start, stop - start)", "slice(0, stop - at)"),
        f"{ROTATION}rotated_keys_are_within_their_bound_of_float64",
    ),
    segments(
        "takes-every-part-of-the-tables-from-position-0",
        "S12",
        edit("kvstore.segments.rope:Rope._parts", "self.magnitude, start)", "self.magnitude, 0)"),
        f"{ROTATION}rotated_keys_are_within_their_bound_of_float64",
    ),
    segments(
        "reads-to-the-next-position",
        "S12",
        edit("kvstore.client.segments:Held._read_one", "keys, match.start)", "keys, match.start + 1)"),
        READ,
    ),
    segments(
        "layer-0-is-not-rotated",
        "S12",
        edit("kvstore.client.segments:Held._read_one", "filled[:, 0, :count]", "filled[1:, 0, :count]"),
        READ,
    ),
    segments(
        "values-are-rotated-too",
        "S12",
        edit("kvstore.client.segments:Held._read_one", "filled[:, 0, :count]", "filled[:, 1, :count]"),
        READ,
    ),
    segments(
        "reads-behind-a-release",
        "S12",
        edit("kvstore.client.segments:Held.read_into", "if self._is_released:", "if False:"),
        f"{STORE}s12_nothing_is_read_under_a_hold_that_was_released[local]",
    ),
    segments(
        "rotates-by-rounded-tables",
        "S12",
        edit("kvstore.segments.rope:_part", ".astype(np.float32) for", ".astype(np.float16).astype(np.float32) for"),
        f"{ROTATION}rotated_keys_are_within_their_bound_of_float64",
    ),
    segments(
        "numpy-turns-the-other-way",
        "S12",
        edit("kvstore.segments.rotation:_turn_in_numpy", "b * cos + a * sin", "b * cos - a * sin"),
        f"{ROTATION}c_and_numpy_give_the_same_bits",
    ),
    segments(
        "rotates-halves-for-all-styles",
        "S12",
        edit("kvstore.segments.rotation:turn", "rope.style is Style.INTERLEAVED", "False"),
        f"{ROTATION}rotated_keys_are_within_their_bound_of_float64",
    ),
    segments(
        "restores-by-the-transpose",
        "S4",
        edit("kvstore.segments.rotation:unrotated", "cosines * cosines + sines * sines", "np.ones_like(cosines)"),
        "segments/test_rotation.py::test_s4_a_rotation_by_rounded_tables_is_undone_by_its_inverse",
    ),
    segments(
        "reads-as-much-as-was-held",
        "S12",
        edit("kvstore.client.segments:Held._read_one", "match.leading(count)", "match"),
        f"{STORE}s12_a_damaged_chunk_ends_its_range_and_no_other",
    ),
    segments(
        "verdict-not-checked",
        "S11",
        skip("kvstore.segments.gate:check"),
        f"{STORE}s11_nothing_is_read_without_a_verdict_that_fits[local]",
    ),
    segments(
        "verdict-of-other-weights",
        "S11",
        edit("kvstore.segments.gate:check_model", "verdict.fingerprint != fingerprint", "False"),
        f"{STORE}s11_nothing_is_read_without_a_verdict_that_fits[local]",
    ),
    segments(
        "verdict-of-other-rope",
        "S11",
        edit("kvstore.segments.gate:check_model", "verdict.rope != rope", "False"),
        f"{STORE}s11_nothing_is_read_without_a_verdict_that_fits[local]",
    ),
    segments("verdict-out-of-bounds", "S11", edit("kvstore.segments.gate:check", "not found.holds", "False"), GATE),
    *(
        segments(f"ignores-{name}", "S11", edit("kvstore.segments.gate:Measured.holds", condition, "True"), GATE)
        for name, condition in (
            ("prompts", "self.prompts > 0"),
            ("agreement", "self.agreement >= bounds.agreement_min"),
            ("kl", "self.kl <= bounds.kl_max"),
            ("answers", "self.answers_lost <= bounds.answers_lost_max"),
            ("work", "self.work <= bounds.work_max"),
        )
    ),
    segments(
        "failed-check-leaves-the-gate",
        "S11",
        edit("kvstore.client.segments:Segments.record", "range(CLOSINGS)", "range(0)"),
        CLOSED,
    ),
    segments(
        "failed-check-opens-the-gate",
        "S11",
        edit("kvstore.client.segments:Segments.verdict", "found is not None and found.holds", "found is not None"),
        CLOSED,
    ),
    segments(
        "closes-a-gate-once",
        "S11",
        edit("kvstore.client.segments:Segments.record", "range(CLOSINGS)", "range(1)"),
        f"{STORE}s11_a_gate_that_was_closed_stays_closed_if_one_file_is_lost",
    ),
    segments(
        "verdicts-leave-no-room-to-close",
        "S11",
        edit("kvstore.client.segments:Segments.record", "VERDICTS_MAX - CLOSINGS", "VERDICTS_MAX"),
        f"{STORE}s11_verdicts_are_bounded",
    ),
    segments(
        "oldest-verdict",
        "S11",
        edit("kvstore.client.segments:Segments._newest", "max(", "min("),
        f"{STORE}s11_the_newest_verdict_is_kept_and_a_lost_one_closes_the_gate[local]",
    ),
    segments(
        "namespace-without-rope", "S2", edit("kvstore.segments.naming:segments_of", '"rope": rope', '"rope": ""'), APART
    ),
    segments(
        "namespace-without-base", "S2", edit("kvstore.segments.naming:segments_of", "base.digest.hex()", '""'), APART
    ),
    segments(
        "namespace-opens-by-hand",
        "S5",
        skip("kvstore.segments.naming:check_exact"),
        f"{STORE}s5_a_namespace_of_segments_opens_only_through_a_model[local-segment]",
    ),
    segments(
        "put-behind-a-prefix",
        "S5",
        edit("kvstore.node.puts:Puts.begin", "if first and wanted.namespace.has_segments", "if False"),
        f"{STORE}s5_a_segment_is_put_from_its_first_token_on[local]",
    ),
    segments(
        "rotates-quantised-rows",
        "S5",
        skip("kvstore.segments.rotation:check_keys"),
        f"{STORE}s5_layouts_whose_keys_cannot_be_rotated_are_refused",
    ),
    segments(
        "moves-keys-of-dynamic-scaling",
        "S5",
        edit("kvstore.segments.scaling:scaled", "if kind in REFUSED", "if False"),
        REFUSED,
    ),
    segments("moves-keys-of-windows", "S5", skip("kvstore.segments.configs:_windows", ""), REFUSED),
    segments("moves-recurrent-state", "S5", skip("kvstore.segments.configs:_recurrence", ""), REFUSED),
    segments(
        "blended-tokens-not-counted",
        "S13",
        edit("kvstore.node.tiered_reads:TieredReads.used", "wanted.namespace.has_segments", "False"),
        f"{STORE}s13_segments_are_no_hits[local]",
    ),
    segments(
        "segments-are-hits",
        "S13",
        edit("kvstore.namespace:Namespace.__post_init__", "SEGMENTS in self.attributes", "False"),
        f"{STORE}s13_segments_are_no_hits[local]",
    ),
]
