"""Mutants of planning: the trie, groups, order, handing out, and results of a batch. Rules: kvstore/planning/PLANNING.md."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, skip

EVERYTHING = "planning/test_plan.py::test_a_plan_equals_the_one_found_by_trying_everything"
HANDING = "planning/test_handing.py::"
RUNS = "client/test_runs.py::test_"
SENDING = "batches/test_sending.py::test_"


def planning(name: str, rule: str, planter: Planter, test: str = EVERYTHING) -> Mutant:
    """A row of a rule of PLANNING.md."""
    return mutant(f"planning-{name}", f"PLANNING {rule}", planter, test)


MUTANTS = [
    planning(
        "counts-part-blocks",
        "T1",
        edit("kvstore.planning.trie:Trie.of", "exact // prompts.block_tokens * prompts.block_tokens", "exact"),
    ),
    planning(
        "loses-a-node-between",
        "T1",
        edit("kvstore.planning.trie:_nodes", "parent[closed] = stack[-1]", "pass"),
    ),
    planning(
        "believes-the-worst-answer",
        "T2",
        edit("kvstore.planning.stored:agreed", "np.maximum(stored, held[trie.deepest])", "held[trie.deepest]"),
    ),
    planning(
        "asks-for-every-prompt",
        "S1",
        edit("kvstore.planning.stored:stored_tokens", "(chunks > 0) & (shared == 0)", "chunks > 0"),
        "planning/test_plan.py::test_what_is_shared_is_asked_once",
    ),
    planning(
        "loads-parts-of-chunks",
        "S2",
        edit("kvstore.planning.plan:make_plan", "prompts.block_tokens % chunk_tokens", "False"),
        "planning/test_plan.py::test_blocks_of_parts_of_chunks_are_refused_with_a_store",
    ),
    planning(
        "counts-the-first-member-as-saved",
        "G1",
        edit("kvstore.planning.grouping:_choices", "(ends[node] - 1)", "ends[node]"),
    ),
    planning(
        "groups-ignore-the-store",
        "G1",
        edit("kvstore.planning.grouping:_gains", "(trie.depth - held)", "(trie.depth)"),
    ),
    planning(
        "members-behind-other-groups",
        "O4",
        edit("kvstore.planning.ordering:_below", "splits[node] or serves[node] == node)", "False)"),
        "planning/test_plan.py::test_a_group_stays_together_around_the_groups_inside_of_it",
    ),
    planning(
        "decodes-last",
        "O3",
        edit("kvstore.planning.ordering:_Unit.place", "-self.ratio", "self.ratio"),
        "planning/test_plan.py::test_prompts_that_decode_more_go_first_and_the_saving_stays",
    ),
    planning(
        "evicts-the-newest",
        "A1",
        edit("kvstore.planning.arrival:_Memory.run", "iter(self._edges.items())", "reversed(self._edges.items())"),
    ),
    planning(
        "memory-without-limit",
        "H2",
        edit("kvstore.planning.handing:Handing.take", "if self._tokens_taken and", "if False and"),
        f"{HANDING}test_what_does_not_fit_into_memory_waits",
    ),
    planning(
        "never-gives-up",
        "H4",
        edit("kvstore.planning.handing:Handing.give_back", "self._attempts_max", "10**9"),
        f"{HANDING}test_a_group_that_is_given_back_too_often_has_failed",
    ),
    planning(
        "forgets-what-others-need",
        "H5",
        edit("kvstore.planning.handing:Handing.still_needed", "self._shared(index, 1)", "0"),
        f"{HANDING}test_what_is_still_needed_is_what_others_share",
    ),
    planning(
        "believes-the-late",
        "H3",
        edit("kvstore.client.runs:Run._leave", "is not taker", "is None"),
        f"{RUNS}a_late_consumer_does_not_end_the_group_of_another[local]",
    ),
    planning(
        "waits-for-the-dead",
        "H3",
        skip("kvstore.client.runs:Run._give_back_of_dead"),
        f"{RUNS}the_group_of_a_consumer_that_dies_goes_out_again[local-dies-0]",
    ),
    planning(
        "holds-nothing",
        "H5",
        edit("kvstore.client.runs:Run.try_take", "taker.held = held", "pass"),
        f"{RUNS}a_prefix_is_held_while_its_group_runs",
    ),
    planning(
        "keeps-the-group-of-a-process-that-died",
        "H3",
        edit("kvstore.client.consumers:Sharing._serve", "raise ConnectionError", "pass"),
        f"{RUNS}a_shared_group_is_done_when_the_next_is_asked_for_and_comes_again_if_not[local-2]",
    ),
    planning(
        "takes-for-a-process-that-is-gone",
        "H3",
        edit("kvstore.client.consumers:Sharing._take", " or _is_gone(link)", ""),
        f"{RUNS}a_consumer_elsewhere_that_ends_while_it_waits_takes_nothing[local]",
    ),
    planning(
        "leaves-part-of-a-result",
        "sending",
        edit("kvstore.batches.results:Results._append", "self._file.truncate(self._whole_bytes)", "pass"),
        f"{SENDING}a_result_that_the_disk_has_no_room_for_leaves_no_part_of_a_line",
    ),
    planning(
        "asks-the-silent-again",
        "sending",
        edit("kvstore.batches.server:Server.post", "break  # another try", "continue  # another try"),
        f"{SENDING}a_server_that_is_silent_costs_one_time_limit",
    ),
    planning(
        "retires-nothing",
        "H5",
        skip("kvstore.client.keeping:TokenKeeping.retire"),
        f"{RUNS}the_next_prefixes_are_brought_into_memory_and_those_that_are_done_leave_it_first",
    ),
    mutant(
        "prefetch-goes-first",
        "MEMORY R2: reads go before prefetches",
        skip("kvstore.node.moving:Moving._give_way"),
        "client/test_moves.py::test_a_prefetch_lets_reads_under_way_go_first_and_not_for_ever",
    ),
    planning(
        "needs-the-store",
        "H6",
        edit("kvstore.client.keeping:TokenKeeping._move", "except KVStoreError", "except ZeroDivisionError"),
        f"{RUNS}a_run_without_a_worker_still_hands_out_its_groups",
    ),
    mutant(
        "batch-trusts-a-cut-line",
        "a result that was cut off is no result",
        edit("kvstore.batches.results:Results._read", "self._file.truncate(self._whole_bytes)", "pass"),
        f"{SENDING}what_has_a_result_is_not_sent_again",
    ),
    mutant(
        "batch-takes-a-long-line-for-a-torn-one",
        "a line that is too long cuts nothing off",
        edit("kvstore.batches.results:Results._read", "if len(line) > LINE_BYTES_MAX:", "if False:"),
        "batches/test_results.py::test_a_line_that_is_too_long_is_an_error_and_cuts_nothing_off",
    ),
    mutant(
        "batch-sends-a-line-that-changed",
        "a batch that changes while it is sent ends the run",
        edit("kvstore.batches.file:Batch._lines", "if crc32(line) != self.checksums[index]:", "if False:"),
        "batches/test_file.py::test_a_line_that_changes_while_the_batch_is_read_again_is_noticed",
    ),
    mutant(
        "batch-never-gives-up",
        "several requests in a row without an answer end the run",
        edit("kvstore.batches.sending:_Sending.land", "if len(self.unreached) >= UNREACHED_MAX:", "if False:"),
        "batches/test_unanswered.py::test_several_in_a_row_without_an_answer_end_the_run",
    ),
    mutant(
        "batch-sends-again",
        "what has a result is not sent again",
        edit("kvstore.batches.sending:send", "if custom_id in results.known:", "if False:"),
        f"{SENDING}what_has_a_result_is_not_sent_again",
    ),
]
