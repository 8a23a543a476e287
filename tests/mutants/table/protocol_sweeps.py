"""Mutants of the protocol of garbage collection, as collectors keep it: gc/PROTOCOL.md, G to O."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, rule
from tests.mutants.planters import before, edit, replace, simulated

LEDGER = "gc/test_ledger.py::test_"
RULES = "gc/test_rules.py::test_"
SWEEPS = "gc/test_protocol.py::test_"
SESSION = "meta/test_meta_session.py::test_"
PINS = "meta/test_pins.py::test_"
VIEW = "node/test_view.py::test_"


SWEEPING = [
    rule(
        "G1",
        "takes-what-was-used-since",
        edit("kvstore_gc.looking:_look", "elif seen.stat.mtime_ns <= victim.mtime_ns:", "else:"),
        f"{SWEEPS}g1_a_chunk_used_since_it_was_listed_is_left_out",
    ),
    rule(
        "G1",
        "looks-once-only",
        edit("kvstore_gc.looking:unused", "if spared[USED] > used_before:", "if False:"),
        f"{SWEEPS}g1_a_chain_used_during_the_look_keeps_the_parents_of_what_it_keeps",
    ),
    rule(
        "G2",
        "condemns-over-another",
        simulated("condemn_blind"),
        f"{LEDGER}g2_a_shard_that_is_being_swept_is_not_condemned_again",
    ),
    rule(
        "G2",
        "condemns-without-absent",
        edit("kvstore_gc.ledger:Ledger.condemn", "(*free, compare)", "(compare,)"),
        f"{LEDGER}g2_a_shard_that_is_condemned_meanwhile_is_left_to_who_was_faster",
    ),
    rule(
        "C1",
        "condemns-off-the-chain",
        edit("kvstore_gc.ledger:Ledger.condemn", "(*free, compare)", "free"),
        f"{LEDGER}c1_a_link_is_put_behind_the_last_one_or_not_at_all",
    ),
    rule("G4", "no-grace", simulated("no_grace"), f"{RULES}g4_the_grace_of_a_sweep_is_of_every_session"),
    rule(
        "G4",
        "unreadable-session-skipped",
        edit("kvstore_gc.grace:Announced.of", '-1, b""', '1 << 62, b""'),
        f"{RULES}g4_a_session_that_cannot_be_read_is_waited_for",
    ),
    rule(
        "G4",
        "refs-before-grace",
        simulated("refs_before_grace"),
        f"{RULES}g4_a_pin_put_until_the_grace_is_over_is_spared",
    ),
    rule(
        "G4",
        "held-not-spared",
        simulated("held_not_spared"),
        f"{SWEEPS}a2_a_held_chunk_is_spared_and_holds_no_sweep_up",
    ),
    rule(
        "G4",
        "held-of-the-second-read-alone",
        edit("kvstore_gc.grace:Grace.decide", "held += held_again", "held = held_again"),
        "gc/test_races.py::test_g4_what_was_held_when_the_pins_were_read_is_spared",
    ),
    rule(
        "A2",
        "held-is-chosen-again",
        edit("kvstore_gc.grace:Grace.kept", "(held for _, held in self._held)", "()"),
        "gc/test_rounds.py::test_after_a_round_that_had_to_spare_what_is_held_the_next_takes_others",
    ),
    rule(
        "A2",
        "held-settles-a-round",
        edit("kvstore_gc.rounds:Rounds.run", 'if not summary.spared["held"]:', "if True:"),
        "gc/test_rounds.py::test_after_a_round_that_had_to_spare_what_is_held_the_next_takes_others",
    ),
    rule(
        "G4",
        "refs-not-spared",
        edit("kvstore_gc.trash:Trash.reap", "if one.address not in spared", ""),
        f"{RULES}g4_a_pin_put_until_the_grace_is_over_is_spared",
    ),
    rule(
        "G5", "no-incarnation", simulated("no_incarnation_check"), f"{SWEEPS}g5_a_publication_that_came_later_goes_back"
    ),
    rule(
        "G5", "fixed-trash-name", simulated("fixed_trash_name"), f"{RULES}g5_each_run_has_names_of_its_own_in_the_trash"
    ),
    rule(
        "G5",
        "restore-overwrites",
        edit(
            "kvstore.root.fence:restore",
            "return root.publish(",
            "return root.move(entry, places.chunk(*found, shard_bits)) or root.publish(",
        ),
        "fsck/test_adopt.py::test_c6_a_newer_publication_stays_where_the_trash_has_an_older_one",
    ),
    rule(
        "G6",
        "closes-before-the-fence",
        simulated("close_before_fence"),
        f"{RULES}g6_the_fence_is_up_before_the_key_goes",
    ),
    rule(
        "G6",
        "closes-blind",
        simulated("close_blind"),
        f"{LEDGER}g6_closing_leaves_a_shard_that_another_sweep_has_by_now",
    ),
    rule(
        "G6",
        "closing-compares-the-first-key",
        edit(
            "kvstore_gc.ledger:Ledger._end",
            "for one in left]\n            deletes",
            "for one in left[:1]]\n            deletes",
        ),
        f"{LEDGER}g6_closing_compares_the_key_of_every_shard",
    ),
    rule(
        "G6",
        "stamp-not-compared",
        edit(
            "kvstore_gc.ledger:still_there",
            "(now.sweep, now.stamp) == (one.sweep, one.stamp)",
            "now.sweep == one.sweep",
        ),
        f"{LEDGER}g2_a_sweep_is_known_by_its_stamp_too",
    ),
    rule(
        "G1",
        "plans-fill-the-disk",
        edit("kvstore_gc.execute:Sweeper._prepare_all", "not make_room_late(self._root, self._site.pause)", "False"),
        "gc/test_hostile.py::test_plans_leave_room_for_the_log_of_the_metadata_that_name_them",
    ),
    rule(
        "G7",
        "nobody-adopts",
        edit("kvstore_gc.execute:Sweeper.adopt", "self._finish(sweeps, report)", "pass"),
        f"{SWEEPS}g7_a_sweep_left_by_a_dead_collector_is_adopted",
    ),
    rule(
        "G7",
        "waits-for-the-lease-of-the-dead",
        edit("kvstore_gc.rounds:Rounds.run", "mine if self._has_adopted else None", "mine"),
        "gc/test_collectors.py::test_g7_one_that_has_just_started_ends_what_a_dead_one_left_in_shards_that_it_has_still",
    ),
    rule(
        "G8",
        "abandons-what-was-taken-from",
        edit("kvstore_gc.execute:Sweeper._abandon", "if not self._root.traits.fenced or", "if True or"),
        f"{RULES}g8_a_sweep_in_which_another_run_has_taken_something_is_not_abandoned",
    ),
    rule(
        "G8",
        "abandons-a-final-list",
        edit("kvstore_gc.ledger:Ledger.abandon", "not now.record.is_final", "True"),
        f"{LEDGER}g8_a_sweep_whose_list_became_final_is_not_abandoned",
    ),
    rule(
        "G4",
        "damaged-plan-believed",
        edit("kvstore_gc.victims:read_victims", "or _checksum(content) != checksum", ""),
        f"{RULES}a_plan_that_was_changed_takes_nothing",
    ),
]


FENCING = [
    rule(
        "F1",
        "no-fence",
        simulated("no_fence"),
        f"{SWEEPS}c4_a_node_fences_the_sweeps_that_etcd_has_forgotten_before_it_protects",
    ),
    rule("F2", "late-mkdir", simulated("late_mkdir"), f"{RULES}f2_only_the_creator_of_a_sweep_makes_its_folder"),
    rule(
        "F3",
        "fence-drains",
        edit("kvstore.root.fence:lift", "restore(root, name, shard_bits)", "root.remove(name)"),
        f"{SWEEPS}f3_a_folder_that_no_key_names_gives_back_what_is_in_it",
    ),
    rule(
        "F3",
        "etcd-not-read-again",
        edit(
            "kvstore.root.fence:lift",
            "            return True\n        if is_named():",
            "            return True\n        if False:",
        ),
        f"{RULES}f3_a_folder_that_a_key_names_by_now_is_left_alone",
    ),
    rule(
        "F4",
        "broken-fence-unsaid",
        edit("kvstore.root.check_posix:_PosixTries.fence", "ok = not late and not risen", "ok = not risen"),
        "root/test_check.py::test_a_fence_that_does_not_hold_is_told_in_the_words_of_the_weak_guarantee",
    ),
]


RESTORED = [
    rule(
        "C1",
        "any-event-applied",
        edit("kvstore.node.view:View._follow", "if seq.prev != self._nonce:", "if False:"),
        f"{VIEW}c1_what_does_not_continue_the_chain_is_not_applied",
    ),
    rule(
        "C2",
        "lost-write-unnoticed",
        simulated("no_chains"),
        f"{SESSION}c2_a_store_that_went_back_in_time_ends_the_session",
    ),
    rule(
        "C3",
        "no-reread",
        simulated("no_reread"),
        f"{RULES}c3_a_sweep_whose_key_went_after_the_read_that_decides_takes_nothing",
    ),
    rule(
        "C4",
        "no-start-fence",
        simulated("no_start_fence"),
        f"{SWEEPS}c4_a_node_fences_the_sweeps_that_etcd_has_forgotten_before_it_protects",
    ),
    rule("C5", "twins-not-spared", simulated("no_twins"), f"{RULES}c5_a_pin_that_only_its_twin_remembers_is_spared"),
    rule(
        "C5",
        "twin-after-the-key",
        edit(
            "kvstore.meta.pins:Pins.pin",
            "            if self._twins is not None:",
            "            self._put(session, record, Deadline(timeout_s))\n            if self._twins is not None:",
        ),
        f"{PINS}c5_the_twin_is_there_before_the_key",
    ),
    rule(
        "C5",
        "twin-removed-first",
        before("kvstore.meta.pins:Pins.unpin", lambda self, owner, pin, *rest: self._twins.remove(owner, pin)),
        f"{PINS}c5_the_twin_stays_until_the_key_is_known_to_be_gone",
    ),
    rule(
        "C5",
        "unreadable-twin-skipped",
        edit("kvstore_gc.execute:Sweeper._twins", "if name in list_twins(self._root):", "if False:"),
        "gc/test_hostile.py::test_c5_what_is_no_twin_any_more_stops_collectors_and_is_named",
    ),
    rule(
        "C6",
        "node-of-another-generation-protects",
        edit("kvstore.meta.generation:join_generation", "if on_root == in_meta:", "if on_root is not None:"),
        "node/test_follower.py::test_c6_a_node_of_another_generation_stands_aside",
    ),
    rule(
        "C6",
        "collector-does-not-compare-again",
        edit("kvstore_gc.execute:Sweeper._finish_all", "self._check()", "pass"),
        f"{RULES}c6_root_and_etcd_are_compared_again_before_anything_is_taken",
    ),
    rule(
        "C6",
        "collector-runs-on-a-foreign-etcd",
        edit("kvstore_gc.rounds:Rounds._join", "raise RootMismatch(standing.why)", "pass"),
        "gc/test_rounds.py::test_a_collector_does_not_run_on_an_etcd_that_does_not_know_the_root",
    ),
]


OBJECTS = [
    rule("O1", "deletes-blindly", simulated("blind_delete"), f"{RULES}o1_a_publication_that_came_later_stays"),
    rule(
        "O1",
        "deletes-from-its-own-list",
        edit(
            "kvstore_gc.objects:Deleting.reap",
            "victims = read_victims(self._root, sweep.sweep, settled.record.plan_checksum)",
            "pass",
        ),
        f"{RULES}o1_every_run_deletes_from_the_list_that_became_final",
    ),
    rule(
        "O1",
        "closes-with-victims-left",
        replace("kvstore_gc.objects:Deleting._are_gone", lambda self, victims: True),
        f"{RULES}o1_a_delete_that_misses_keeps_its_sweep_open",
    ),
    rule(
        "O1",
        "a-root-without-either-is-swept",
        edit(
            "kvstore_gc.execute:Sweeper.__init__",
            "if not (traits.fenced or traits.conditional_remove):",
            "if False:",
        ),
        f"{SWEEPS}o1_a_store_that_can_neither_fence_nor_delete_conditionally_is_refused",
    ),
]


MUTANTS: list[Mutant] = [*SWEEPING, *FENCING, *RESTORED, *OBJECTS]
