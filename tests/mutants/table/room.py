"""Mutants of the room of a root and of leftovers: gc/PROTOCOL.md, section 6, leftovers, quarantine, clears."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, replace, skip

LEVEL = "gc/test_capacity.py::test_"
USAGE = "node/test_usage.py::test_"
LOANS = "meta/test_meta_sqlite_loans.py::test_s8_"
CLAIMS = "node/test_claims.py::test_s6_"
ORPHANS = "gc/test_orphans.py::test_"
UNREADABLE = "node/test_unreadable.py::test_"


def bound(name: str, planter: Planter, test: str) -> Mutant:
    """A row about the bound."""
    return mutant(f"bound-{name}", "PROTOCOL 6: the bound", planter, test)


def left(name: str, planter: Planter, test: str) -> Mutant:
    """A row about leftovers."""
    return mutant(f"left-{name}", "PROTOCOL: leftovers", planter, test)


BOUND = [
    bound(
        "loans-of-the-last-counting-forgotten",
        edit("kvstore.meta.sqlite.loans:Loans._lend", "self._used_bytes() + before_bytes", "self._used_bytes()"),
        f"{LOANS}the_root_is_counted_again_and_what_was_lent_since_counts_once_more",
    ),
    bound(
        "loans-of-another-boot-are-believed",
        edit("kvstore.meta.sqlite.loans:Loans._lend", "level.boot != self._boot or ", ""),
        f"{LOANS}a_level_of_another_boot_is_counted_anew",
    ),
    bound(
        "first-loan-has-its-put-alone",
        edit("kvstore.node.claims:Claims._borrow", "self._owed_bytes + left_bytes", "0"),
        "node/test_claims.py::test_s8_a_first_loan_has_what_is_left_of_a_claim_and_the_next_has_not",
    ),
    bound(
        "lends-where-the-metadata-are-well",
        replace("kvstore.node.host_loans:HostLoans.is_lost", lambda self: True),
        "client/test_lost_metadata.py::test_where_the_metadata_are_well_nothing_is_borrowed",
    ),
    bound(
        "moment-is-no-loan",
        edit(
            "kvstore.node.claims:Claims._moment",
            "self._borrow(lacking_bytes, moment_bytes - lacking_bytes, left_bytes)",
            "moment_bytes - lacking_bytes",
        ),
        "node/test_claims.py::test_s8_a_moment_is_a_loan_as_well",
    ),
    bound(
        "level-survives-loans",
        edit("kvstore.node.claims:Claims._claim", "self._bounds.forget(TIMEOUT_S)", "pass"),
        "node/test_claims.py::test_s8_no_level_is_known_while_loans_are_left",
    ),
    bound(
        "word-of-the-dead-is-taken-for-a-count",
        edit("kvstore.node.usage:NodeUsage.due", " and self._was_counted", ""),
        f"{USAGE}a_node_says_at_once_that_a_word_binds_it",
    ),
    bound(
        "last-word-binds-for-ever",
        edit("kvstore.node.usage:NodeUsage._claim", "bound is not None and self._in_session", "bound is not None"),
        "node/test_claims.py::test_s8_the_last_word_of_a_collector_binds_no_node_whose_metadata_are_lost",
    ),
    bound(
        "loans-outlive-an-adoption",
        edit("kvstore.cli.fsck:_adopt_on_host", "end_loans(root.path)", "pass"),
        "client/test_lost_metadata.py::test_a_store_that_opens_later_reads_and_puts_up_to_its_bound",
    ),
    bound(
        "level-outlives-the-lease-of-its-collector",
        edit("kvstore_gc.collectors:Collectors._join", "if self._has_joined:", "if False:"),
        "gc/test_service.py::test_s8_a_collector_of_one_host_whose_lease_ended_counts_again",
    ),
    bound(
        "survey-of-before-is-taken-for-the-level",
        edit("kvstore_gc.capacity:Watermarks.surveyed", "mark.losses != self._losses", "False"),
        "gc/test_capacity.py::test_s8_a_level_that_was_forgotten_is_unknown_until_a_survey_that_began_later",
    ),
    bound(
        "says-late-that-it-is-bound",
        edit("kvstore.node.usage:NodeUsage.due", " or now.is_bound > self._told.is_bound", ""),
        f"{USAGE}a_node_says_at_once_that_a_word_binds_it",
    ),
    bound(
        "up-is-ready-at-the-first-word",
        edit("kvstore.cli.host:Host._bound_pids", "Usage.from_json(told.value).is_bound", "True"),
        "cli/test_host.py::test_the_workers_are_told_of_once_a_word_binds_each",
    ),
    bound(
        "debt-waits-for-the-next-put",
        edit("kvstore.node.usage:NodeUsage.due", "self._written > self._claimed", "False"),
        f"{CLAIMS}what_a_put_wrote_beyond_its_claim_is_claimed_though_no_other_follows",
    ),
    bound(
        "what-was-claimed-is-forgotten",
        replace("kvstore_gc.signs:RoomSign._claimed_bytes", lambda *_: 0),
        "gc/test_reports.py::test_s6_what_was_claimed_and_not_reported_counts_when_a_collector_ends_soon",
    ),
    bound(
        "gives-back-what-was-lent",
        edit("kvstore.node.claims:Claims.settle", "left_bytes - self._owed_bytes", "left_bytes"),
        f"{CLAIMS}what_was_lent_is_not_given_back_and_what_was_written_of_it_counts",
    ),
    bound(
        "level-begins-beside-a-word",
        edit("kvstore.meta.bounds:Bounds.claim", ", Absent(self._keys.gc_room))", ",)"),
        f"{CLAIMS}no_level_begins_beside_a_word_though_the_root_is_empty",
    ),
    bound(
        "level-of-a-collector-is-lost",
        edit("kvstore.meta.bounds:Bounds.leave", "0 if found is None else _bytes_of(found)", "0"),
        f"{CLAIMS}a_collector_that_ends_adds_its_level_to_one_that_has_begun",
    ),
    bound(
        "one-put-above-all",
        edit("kvstore.node.view:View.check_room", "size_bytes > self.put_bytes_max", "False"),
        "client/test_bounded.py::test_a_put_that_is_larger_than_the_bound_is_refused",
    ),
    bound(
        "check-ignores-lost-metadata",
        replace("kvstore.cli.fsck:_astray", lambda *_: None),
        "client/test_host.py::test_a_check_says_that_the_metadata_are_lost_and_makes_none",
    ),
    bound(
        "two-etcds-of-one-root",
        edit("kvstore.cli.up:_only_one", "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
        "cli/test_up.py::test_a_second_up_on_one_root_is_refused_at_once",
    ),
    bound(
        "node-never-stops",
        replace("kvstore.node.usage:NodeUsage._fits", lambda self: True),
        f"{USAGE}a_node_stops_by_itself_until_its_report_was_counted",
    ),
    bound(
        "word-of-others-is-obeyed",
        edit("kvstore.node.usage:NodeUsage._counted", "self._reports[0][0] > self._bound.revision", "False"),
        f"{USAGE}a_node_obeys_no_word_that_has_not_counted_it",
    ),
    bound(
        "word-of-others-stays",
        edit("kvstore.node.usage:NodeUsage.hear", "room is None and not self._was_counted", "False"),
        f"{USAGE}a_word_that_never_counted_a_node_ends_with_its_collector",
    ),
    bound(
        "puts-begin-uncounted",
        edit("kvstore.node.usage:NodeUsage._fits", "self._written + self._granted + size_bytes", "self._written"),
        f"{USAGE}a_put_counts_before_it_begins_and_what_it_did_not_write_comes_back",
    ),
    bound(
        "what-was-taken-back-is-written",
        edit(
            "kvstore.node.usage:NodeUsage._counted", "min(taken for _, taken in self._reports)", "self._reports[0][1]"
        ),
        f"{USAGE}a_put_whose_report_is_taken_back_gives_no_room_to_the_next",
    ),
    bound(
        "all-that-wait-ask",
        edit("kvstore.node.usage:NodeUsage._asked", "asked and asked + size_bytes > most", "False"),
        f"{USAGE}puts_that_wait_are_asked_for_in_turn_and_keep_no_smaller_one_from_its_room",
    ),
    bound(
        "asks-without-end",
        edit("kvstore.node.usage:NodeUsage._asked", "time.monotonic() >= self._asks_from_s", "True"),
        f"{USAGE}after_a_put_that_got_no_room_others_have_their_turn",
    ),
    bound(
        "what-is-stored-needs-room",
        edit("kvstore.node.usage:NodeUsage.reserve", " if missing_bytes is None else missing_bytes()", ""),
        f"{USAGE}what_is_stored_already_needs_no_room",
    ),
    bound(
        "asks-show-the-sign",
        edit("kvstore_gc.signs:FullSign.follow", " - watermarks.asked_bytes", ""),
        f"{LEVEL}what_is_asked_for_shows_no_sign",
    ),
    bound(
        "room-is-never-given-back",
        edit("kvstore.node.usage:Reserved.release", "self.usage._released.append(size_bytes)", "pass"),
        f"{USAGE}what_a_node_puts_and_clears_is_what_it_reports",
    ),
    bound(
        "puts-under-way-not-counted",
        edit("kvstore_gc.capacity:Watermarks._taken_bytes", "self.pending_bytes + ", ""),
        f"{LEVEL}puts_under_way_count_until_they_end",
    ),
    bound(
        "puts-of-those-that-die-during-a-listing-forgotten",
        edit("kvstore_gc.capacity:Watermarks.surveyed", "not in mark.gone", "not in self._gone"),
        f"{LEVEL}puts_under_way_of_one_that_is_gone_count_until_a_listing_after_its_end",
    ),
    bound(
        "rounds-ignore-puts-under-way",
        edit("kvstore_gc.rounds:Rounds._decided", " + self._watermarks.pending_bytes", ""),
        "gc/test_rounds.py::test_a_round_makes_room_for_puts_that_wait_for_it",
    ),
    bound(
        "new-nodes-have-no-share",
        edit("kvstore_gc.signs:RoomSign.follow", "max(self._nodes_count, self._reports.reporters_count)", "1"),
        "gc/test_reports.py::test_all_whose_reports_are_counted_have_a_share",
    ),
    bound(
        "bound-ends-with-its-collector",
        edit("kvstore.node.usage:NodeUsage._lapse", "now_s - self._unasked_s >= KEPT_S", "True"),
        f"{USAGE}the_bound_of_a_collector_that_died_lasts_until_another_one_has_counted",
    ),
    bound(
        "word-without-a-count-frees-nodes",
        edit(
            "kvstore.node.usage:NodeUsage.hear", "if room is not None and room.allowance_bytes is not None:", "if room:"
        ),
        f"{USAGE}the_bound_of_a_collector_that_died_lasts_until_another_one_has_counted",
    ),
    bound(
        "writes-not-counted",
        skip("kvstore.node.usage:NodeUsage.wrote"),
        f"{USAGE}what_a_node_puts_and_clears_is_what_it_reports",
    ),
    bound(
        "puts-without-a-claim",
        edit(
            "kvstore.node.usage:NodeUsage._fits",
            "self.claiming is None or taken_bytes <= self._claimed",
            "True",
        ),
        f"{CLAIMS}a_node_writes_no_more_than_was_claimed",
    ),
    bound(
        "lends-again-without-metadata",
        edit("kvstore.node.claims:Claims._moment", "if self._owed_bytes or", "if"),
        f"{CLAIMS}a_node_that_lost_the_metadata_goes_on_for_a_moment_and_claims_it_later",
    ),
    bound(
        "lends-to-each-program",
        edit("kvstore.node.claims:Claims._moment", " or not self._has_claimed", ""),
        f"{CLAIMS}a_program_that_never_had_the_metadata_writes_nothing_beyond_its_bound",
    ),
    bound(
        "overdraft-not-counted",
        edit("kvstore.node.claims:Claims.settle", "if back_bytes:", "if back_bytes > 0:"),
        f"{CLAIMS}what_a_put_wrote_beyond_its_size_goes_to_the_level",
    ),
    bound(
        "claims-go-on-beside-a-word",
        edit("kvstore_gc.signs:RoomSign._say", "if self._bounds is not None and", "if False and"),
        "gc/test_reports.py::test_s6_the_first_word_ends_all_claims_and_a_collector_that_ends_leaves_the_level",
    ),
    bound(
        "unreported-writes-forgotten",
        edit(
            "kvstore.node.usage:NodeUsage.begin",
            "self._written if self._bound is None else self._written_told",
            "self._written",
        ),
        f"{USAGE}what_the_last_session_did_not_report_is_reported_by_the_next_one",
    ),
    bound(
        "writes-of-the-dead-forgotten",
        edit("kvstore_gc.capacity:Watermarks.gone", "self._gone.add(reporter)", "self._reported.pop(reporter, None)"),
        f"{LEVEL}what_a_reporter_wrote_stays_when_its_key_is_gone",
    ),
    bound(
        "writes-during-a-listing-lost",
        edit(
            "kvstore_gc.capacity:Watermarks.surveyed",
            "self._answered.get(reporter, mark.reported.get(reporter, NONE)).written_bytes",
            "usage.written_bytes",
        ),
        f"{LEVEL}what_is_written_while_a_survey_lists_counts_twice_and_is_never_lost",
    ),
    bound(
        "late-deletions-subtracted",
        edit(
            "kvstore_gc.capacity:Watermarks.reported",
            "if removed_bytes and self._clock.monotonic_s() < self._settles_s:",
            "if False:",
        ),
        f"{LEVEL}what_is_deleted_while_a_survey_lists_is_not_subtracted_from_it",
    ),
    bound(
        "largest-limit-holds",
        edit(
            "kvstore_gc.capacity:Watermarks.limited",
            "min(limits) if limits else None",
            "max(limits) if limits else None",
        ),
        f"{LEVEL}the_smallest_limit_of_the_collectors_holds_and_makes_a_round_urgent",
    ),
    bound(
        "each-node-may-fill-the-root",
        edit("kvstore_gc.signs:room_of", "int(beyond_bytes / shares)", "int(beyond_bytes)"),
        f"{LEVEL}nodes_may_write_together_what_lies_between_the_stop_mark_and_the_capacity",
    ),
    bound(
        "gap-check-starved",
        edit(
            "kvstore.node.follower:Follower._step",
            "if any(event.key == self._keys.gc_seq for event in events):",
            "if True:",
        ),
        f"{USAGE}a_gap_of_the_chain_is_found_although_other_keys_go_on_changing",
    ),
]

LEFT = [
    left(
        "staged-by-a-session-just-gone",
        edit("kvstore_gc.orphans:Orphans._dead", "now_s - gone_s >= self._timings.dead_session_s", "True"),
        f"{ORPHANS}what_a_session_staged_that_was_seen_alive_goes_soon_after_it_is_gone",
    ),
    left(
        "staged-without-a-session",
        replace("kvstore_gc.orphans:Orphans._is_left", lambda self, folder, entry, now_s, *, is_dead: True),
        f"{ORPHANS}a_node_without_a_session_keeps_what_it_staged_lately",
    ),
    left(
        "old-plan-named",
        replace("kvstore_gc.execute:Sweeper._is_within", lambda self, since_s, seconds: True),
        "gc/test_protocol.py::test_a_collector_that_was_slow_after_it_wrote_a_plan_gives_the_sweep_up",
    ),
    left(
        "quarantine-keeps-its-room",
        replace("kvstore_gc.quarantine:Quarantine._allowed_bytes", lambda self: None),
        f"{ORPHANS}damaged_files_take_a_hundredth_of_the_capacity_at_most_and_the_oldest_go",
    ),
]

HELD = [
    mutant(
        "unreadable-never-suspected",
        "PROTOCOL W3: a file that cannot be read is repaired",
        replace("kvstore.node.unreadable:Unreadable.__contains__", lambda self, address: False),
        f"{UNREADABLE}a_file_that_nobody_can_read_is_repaired_by_the_next_put",
    ),
    mutant(
        "p5-pin-ignores-a-clear",
        "PROTOCOL P5",
        replace("kvstore.node.member:Member._check_barriers", lambda self, namespace: None),
        "node/test_pin_and_clear.py",
    ),
    mutant(
        "p5-barrier-not-looked-at",
        "PROTOCOL P5",
        replace("kvstore.meta.barriers:Barrier.check", lambda self: None),
        "node/test_pin_and_clear.py",
    ),
    mutant(
        "h4-lease-never-ends",
        "PROTOCOL H4: a client's hold is leased",
        edit("kvstore.node.holds:Holds.renew", "min(hold.last_s, now_s + lease_s)", "hold.last_s"),
        "worker/test_leased_holds.py::test_a_hold_lives_as_long_as_it_is_renewed_and_no_longer",
    ),
]

CHAINS = "node/test_block_chains.py::test_"

AGED = [
    mutant(
        "block-depth-not-stamped",
        "FORMAT 5: an engine can only use a prompt's leading blocks",
        edit("kvstore.node.publish:Publication.begin_run", "if depths else", "if False else"),
        f"{CHAINS}a_put_stamps_blocks_with_their_place_in_the_prompt[native]",
    ),
    mutant(
        "block-look-up-renews-nothing",
        "FORMAT 5: whoever asks for a prompt renews all of it",
        replace("kvstore.node.tiered_reads:TieredReads.looked_up", lambda self, wanted: None),
        f"{CHAINS}who_asks_for_a_prompt_renews_all_of_it_once_in_a_quantum[match]",
        f"{CHAINS}who_asks_for_a_prompt_renews_all_of_it_once_in_a_quantum[present]",
        f"{CHAINS}who_asks_for_a_prompt_renews_all_of_it_once_in_a_quantum[hold]",
    ),
    mutant(
        "block-renewal-forgets-its-place",
        "FORMAT 5: a renewal keeps the greater place",
        edit(
            "kvstore.node.refresh:Refresher._planned",
            "max(renewal.depths[index], decode(mtime_ns, quantum_s).depth)",
            "renewal.depths[index]",
        ),
        f"{CHAINS}a_read_of_the_last_blocks_alone_keeps_their_place",
    ),
]

BRANCHES = "node/test_superseding.py::test_"

ABANDONED = [
    mutant(
        "superseded-the-head-and-not-the-tail",
        "FORMAT 5: only what is behind the kept part is abandoned",
        edit("kvstore.node.refresh:Refresher.superseded", "wanted.addresses[first:]", "wanted.addresses[:first]"),
        f"{BRANCHES}what_is_behind_the_kept_tokens_goes_first_with_its_hints[local]",
    ),
    mutant(
        "superseded-though-others-used-it",
        "FORMAT 5, superseding, rule 2: others use it",
        edit("kvstore.node.refresh:Refresher._supersede", "was.last_use_s > latest_s", "False"),
        f"{BRANCHES}what_another_branch_used_later_stays_with_all_before_it[local]",
    ),
    mutant(
        "superseded-though-used-since",
        "FORMAT 5, superseding, rule 2: used since the caller left it",
        edit("kvstore.node.known:Known.quantum", "self._clock.now_s() - ago_s", "self._clock.now_s()"),
        f"{BRANCHES}what_anybody_used_since_stays[local]",
    ),
    mutant(
        "superseded-for-good",
        "FORMAT 5: the next use of a superseded chunk takes it back",
        edit("kvstore.node.refresh:Refresher._supersede", "chunks.known.forget(branch.addresses[place])", "pass"),
        f"{BRANCHES}blocks_are_superseded_and_taken_back_alike[local-match]",
        f"{BRANCHES}the_next_use_takes_a_branch_back[local-get-False]",
    ),
    mutant(
        "superseded-counts-for-nothing",
        "an abandoned branch goes first",
        edit("kvstore_gc.policy:ranks", "uses.superseded * OCTAVES_SUPERSEDED", "0"),
        "gc/test_policy.py::test_an_abandoned_branch_goes_before_what_was_not_used_for_half_a_day",
    ),
]

MUTANTS: list[Mutant] = [*BOUND, *LEFT, *HELD, *AGED, *ABANDONED]
