"""Mutants of the protocol of garbage collection, as nodes keep it: gc/PROTOCOL.md, W to P."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, rule
from tests.mutants.planters import edit, replace, simulated, skip

RULES = "gc/test_rules.py::test_"
SWEEPS = "gc/test_protocol.py::test_"
NODE = "node/test_follower_rules.py::test_"
SESSION = "meta/test_meta_session.py::test_"
PINS = "meta/test_pins.py::test_"
VIEW = "node/test_view.py::test_"
BLOCKS = "gc/test_block_holds.py::test_"


PUBLISHING = [
    rule(
        "W1",
        "link-replaces",
        replace(
            "kvstore.root.posix:PosixRoot._link", lambda self, source, path: __import__("os").replace(source, path)
        ),
        "root/test_conformance.py::test_rule_W1_the_first_writer_wins_and_nothing_is_replaced",
    ),
    rule(
        "W1",
        "publish-replaces-in-memory",
        simulated("publish_replaces"),
        "root/test_conformance.py::test_rule_W1_the_first_writer_wins_and_nothing_is_replaced",
    ),
    rule(
        "W2",
        "stage-opened-twice",
        edit("kvstore.root.posix:PosixRoot._create", "os.O_EXCL |", "os.O_TRUNC |"),
        "root/test_conformance.py::test_rule_W2_a_staging_name_is_refused_a_second_time_and_keeps_its_content",
    ),
    rule(
        "W3",
        "set-aside-deletes",
        simulated("set_aside_deletes"),
        "node/test_verifying.py::test_w3_what_was_repaired_between_the_look_and_the_rename_goes_back",
    ),
]


SESSIONS = [
    rule(
        "V1",
        "gc-read-before-session",
        simulated("view_before_session"),
        f"{RULES}v1_a_session_s_key_is_there_before_gc_is_read",
    ),
    rule(
        "V2",
        "rejoin-keeps-holds",
        simulated("rejoin_keeps_holds"),
        f"{NODE}v2_holds_end_with_their_session_and_do_not_come_back_with_the_next",
    ),
    rule(
        "V2",
        "start-keeps-holds",
        edit("kvstore.node.follower:Follower.begin", "self._holds.drop_all()", "pass"),
        f"{NODE}v2_what_was_held_before_a_session_protects_nothing_and_ends_with_its_start",
    ),
    rule(
        "V2",
        "ttl-counts-from-the-answer",
        edit("kvstore.meta.session:Session.beat", "max(self._acknowledged_s, sent_s)", "self._clock.monotonic_s()"),
        f"{SESSION}v2_time_counts_from_when_the_acknowledged_keepalive_was_sent",
    ),
    rule(
        "V2",
        "ttl-never-ends",
        edit("kvstore.meta.session:Session.alive", ">= self.ttl_s", ">= 10 * self.ttl_s"),
        f"{SESSION}v2_without_an_acknowledged_keepalive_for_its_ttl_it_is_dead_for_ever",
    ),
    rule(
        "V3",
        "lost-watch-keeps-births",
        skip("kvstore.node.holds:Holds.age_all"),
        f"{NODE}v3_holds_of_before_a_lost_watch_are_older_than_everything",
    ),
    rule(
        "V3",
        "lost-watch-no-key-check",
        skip("kvstore.meta.session:Session.check_chain"),
        f"{NODE}v3_after_a_lost_watch_a_session_whose_last_write_is_lost_ends",
    ),
    rule(
        "V3",
        "silent-watch-believed",
        skip("kvstore.node.follower:Follower._look_for_gap"),
        f"{NODE}v3_a_watch_that_fell_silent_on_a_restored_store_ends_the_session",
    ),
]


HOLDING = [
    rule(
        "H1",
        "match-ignores-condemned",
        simulated("match_ignores_condemned"),
        f"{VIEW}h1_the_lead_ends_at_the_first_condemned_address",
    ),
    rule(
        "H1",
        "question-is-answered-from-memory-under-a-sweep",
        edit("kvstore.worker.questions:Questions._leading", "node.gc_view.is_calm", "True"),
        "worker/test_questions.py::test_a_prompt_that_memory_has_is_found_by_its_tokens_unless_a_sweep_is_in_flight",
    ),
    rule(
        "H1",
        "blocks-that-are-near-and-condemned",
        edit(
            "kvstore.node.blocks:Blocks._present", "present &= unswept & self._view.unswept(asked)", "present |= False"
        ),
        "native/test_looks.py::test_h1_condemned_blocks_count_as_absent[memory]",
    ),
    rule(
        "H1",
        "blocks-condemned-while-looked-for-are-remembered",
        edit(
            "kvstore.node.chunk_runs:ChunkRuns._look",
            "native.FOUND, self._known.quantum(), epoch=epoch",
            "native.FOUND, self._known.quantum(), epoch=self._known.epoch",
        ),
        "native/test_looks.py::test_h1_what_is_condemned_while_somebody_looks_is_not_remembered",
    ),
    rule(
        "H1",
        "blocks-are-picked-without-sizes",
        edit("kvstore.node.wanted:Keyed.picked", " if self.sizes_bytes else ()", ""),
        "tiers/test_collecting.py::test_h1_a_match_of_blocks_ends_before_the_first_condemned_one",
    ),
    rule(
        "H2",
        "look-before-hold",
        simulated("look_before_hold"),
        f"{RULES}h2_a_hold_is_registered_before_the_root_is_looked_at",
    ),
    rule(
        "H2",
        "hold-of-blocks-begins-empty",
        edit("kvstore.node.blocks:Blocks.hold", "whatever=True", "whatever=False"),
        f"{BLOCKS}a_sweep_waits_for_a_look_that_goes_on",
    ),
    rule(
        "H2",
        "hold-of-segments-ends-empty",
        edit("kvstore.node.segment_search:hold_segments", "for match in matches)", "for match in ())"),
        "gc/test_segment_holds.py::test_held_segments_outlive_a_sweep_that_takes_the_others",
    ),
    rule(
        "H2",
        "hold-of-blocks-ends-empty",
        edit("kvstore.node.blocks:Blocks.hold", "np.flatnonzero(present).tolist()", "[]"),
        f"{BLOCKS}held_blocks_outlive_sweeps_and_are_read_meanwhile_and_afterwards",
    ),
    rule(
        "H2",
        "hold-of-blocks-not-read-under",
        edit("kvstore.worker.prompts:Prompts.block_hold", "if not hold_id:", "if True:"),
        f"{BLOCKS}held_blocks_outlive_sweeps_and_are_read_meanwhile_and_afterwards[shared]",
        f"{BLOCKS}a_hold_that_its_node_lost_is_broken[grpc]",
    ),
    rule(
        "H2",
        "hold-of-blocks-holds-nothing",
        edit("kvstore.worker.service:Service._hold", "self.holds.add(hold)", "self._node.holds.release(hold)"),
        f"{BLOCKS}held_blocks_outlive_sweeps_and_are_read_meanwhile_and_afterwards[grpc]",
    ),
    rule(
        "H3",
        "known-not-forgotten",
        simulated("cache_not_evicted"),
        f"{VIEW}h3_a_sweep_that_begins_or_ends_makes_its_shard_forgotten",
    ),
    rule(
        "H3",
        "look-outlives-event",
        simulated("cache_epoch_unchecked"),
        f"{VIEW}h3_what_was_looked_at_before_a_sweep_is_not_remembered_after_it",
    ),
    rule(
        "H4",
        "hold-outlives-session",
        edit("kvstore.node.holds:Holds.check", "or (hold.born is not None and not self._view.protects)", ""),
        f"{NODE}h4_nothing_is_read_under_a_hold_once_the_session_is_over",
    ),
    rule(
        "H4",
        "hold-outlives-its-time",
        edit("kvstore.node.holds:Holds.find", "hold and hold.ends_s > self._clock.monotonic_s()", "hold"),
        "node/test_outage.py::test_a_hold_past_its_time_may_not_be_read_any_more",
    ),
    rule(
        "H4",
        "lagging-node-keeps-alive",
        replace("kvstore.node.follower:Follower.keeps_up", lambda self: True),
        f"{NODE}h4_a_node_that_lags_sends_no_keepalive",
    ),
    rule(
        "H4",
        "nobody-is-revoked",
        skip("kvstore_gc.grace:Grace.revoke"),
        f"{SWEEPS}h4_a_session_that_never_announces_is_revoked",
    ),
]


ANNOUNCING = [
    rule(
        "A1",
        "announces-unseen",
        simulated("announce_unseen"),
        f"{NODE}a1_what_the_view_has_not_applied_is_not_announced",
    ),
    rule(
        "A2",
        "announces-while-holding",
        simulated("announce_while_holding"),
        f"{NODE}a2_what_an_older_hold_has_of_a_sweep_is_announced_with_it",
    ),
    rule(
        "A2",
        "announces-before-the-look-has-ended",
        edit(
            "kvstore.node.holds:Holds.announcement",
            "if on is None), default=revision)",
            "if False), default=revision)",
        ),
        f"{NODE}a2_no_sweep_that_an_older_hold_may_find_chunks_of_is_announced",
    ),
    rule(
        "A2",
        "names-what-does-not-fit",
        edit("kvstore.node.holds:Holds.announcement", "revision = condemned[NAMED_MAX][0] - 1", "pass"),
        f"{NODE}a2_sweeps_of_more_held_chunks_than_can_be_named_wait",
    ),
    rule(
        "A2",
        "names-stay",
        edit("kvstore.node.follower:Follower._announce", "following.names and self._view.is_calm", "False"),
        f"{NODE}a2_names_are_taken_back_once_no_sweep_is_in_flight",
    ),
    rule(
        "A2",
        "names-what-is-condemned-alone",
        edit("kvstore.node.holds:Holds.announcement", "named.update(part.addresses)", "pass"),
        f"{NODE}a2_what_an_older_hold_has_of_a_sweep_is_announced_with_it",
    ),
    rule(
        "A2",
        "named-ends-with-its-hold",
        skip("kvstore.node.holds:Holds._linger"),
        f"{NODE}a2_what_was_named_is_named_for_a_while_after_the_hold_has_ended",
    ),
    rule(
        "A2",
        "held-is-not-renewed",
        skip("kvstore.node.holds:Holds.announced"),
        f"{NODE}a2_what_is_held_and_condemned_is_renewed",
    ),
    rule(
        "A3",
        "announces-without-chain",
        edit("kvstore.node.follower:Follower._announce", "session.txn((compare,), ", "session.txn((), "),
        f"{NODE}a3_nothing_is_announced_once_the_chain_of_sweeps_has_gone_on",
    ),
]


PINNING = [
    rule(
        "P1",
        "pin-without-hold",
        simulated("pin_without_hold"),
        "node/test_pins.py::test_p1_the_hold_outlives_the_put_or_there_is_no_pin",
    ),
    rule(
        "P1",
        "pin-ignores-lost-hold",
        edit("kvstore.node.member:Member._pin", "node.holds.check(hold)", "pass"),
        "node/test_pins.py::test_p1_the_hold_outlives_the_put_or_there_is_no_pin",
    ),
    rule(
        "P2",
        "put-without-session-key",
        edit("kvstore.meta.session:Session._write", "(*compares, ModifiedAt(self.key, before))", "(*compares,)"),
        "meta/test_meta_nouns.py::test_p2_a_dead_session_pins_nothing",
        f"{SESSION}a_session_key_that_is_gone_ends_the_session",
        f"{SESSION}c2_a_store_that_went_back_in_time_ends_the_session",
    ),
    rule(
        "P2",
        "pin-drops-held",
        simulated("pin_drops_held"),
        f"{NODE}a2_what_an_older_hold_has_of_a_sweep_is_announced_with_it",
    ),
    rule(
        "P3",
        "unknown-pin-keeps-its-lease",
        skip("kvstore.meta.pins:Pins._drop"),
        "meta/test_meta_nouns.py::test_p3_a_pin_that_is_not_there_is_not_claimed_and_cannot_land_later",
    ),
    rule(
        "P3",
        "unpin-blind",
        edit("kvstore.meta.pins:Pins.unpin", "(ModifiedAt(key, kv.mod_revision),)", "()"),
        f"{PINS}p3_unpinning_removes_what_it_looked_at_and_nothing_else",
    ),
    rule(
        "P4",
        "pin-claims-what-is-gone",
        edit("kvstore.node.member:Member._pin", "tokens = present *", "tokens = len(wanted) *"),
        "node/test_pins.py::test_p4_a_pin_counts_the_tokens_that_are_really_there",
    ),
]


MUTANTS: list[Mutant] = [*PUBLISHING, *SESSIONS, *HOLDING, *ANNOUNCING, *PINNING]
