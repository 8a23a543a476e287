"""Mutations: each leaves out one rule, or breaks it; the search must find the harm that the rule prevents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """``dropped`` in the world ``config`` must break ``invariant``; ``story`` says how, in a line."""

    config: str
    dropped: str
    invariant: str
    rule: str
    story: str

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.config}/{self.dropped}"


MUTATIONS = tuple(
    Mutation(*row)
    for row in (
        # Holds and announcements.
        ("hold", "no_grace", "I1", "G4 grace", "a collector renames under a holder"),
        ("hold", "announce_while_holding", "I1", "A2", "announces although an older hold lives"),
        (
            "hold",
            "announce_unseen",
            "I1",
            "A1",
            "a lagging watch announces etcd's newest, then holds what is condemned",
        ),
        ("hold", "match_ignores_condemned", "I1", "H1", "a node joins after the grace and holds what is about to go"),
        ("hold", "stat_before_hold", "I1", "H2", "stat, a whole sweep passes, hold: the chunk is gone"),
        (
            "hold",
            "stale_stamp",
            "I1",
            "G2 stamp",
            "a second sweep stamped before the first: all have announced it unseen",
        ),
        ("hold", "publish_replaces", "I1", "W1", "rename over a held chunk"),
        ("hold", "rejoin_keeps_holds", "I1", "V2", "the lease died, the node comes back with its old holds"),
        ("hold", "condemn_blind", "I1", "G2 compare", "a second list overwrites the first, whose collector acts later"),
        ("hold", "held_not_spared", "I1", "A2, G4", "a collector takes what a session said that it holds"),
        ("hold", "named_before_grace", "I1", "G4", "what is held was read before the session had announced the sweep"),
        ("c13", "split_named", "I1", "G4", "the grace in the old timeline, what is held in the new one"),
        ("pins", "pin_drops_named", "I1", "P2", "the write of a pin drops what the session said that it holds"),
        ("two", "announce_past_birth", "I1", "A2", "announces one revision past the birth of its oldest hold"),
        ("two", "announce_youngest", "I1", "A2", "announces up to its youngest hold"),
        ("two", "half_event", "I1", "A1", "applies half of a transaction's events, and announces all of it"),
        ("join", "view_before_session", "I1", "V1", "list, a sweep reaches its grace without us, session, hold"),
        ("join", "grace_stale_read", "I1", "G4 read", "sessions were read before G2"),
        # Remembered looks.
        ("cache", "cache_not_evicted", "I1", "H3 evict", "a remembered chunk survives a sweep"),
        ("cache", "cache_unchecked", "I1", "H3 insert", "remembered after the condemned event"),
        ("looks", "look_outlives_event", "I1", "H3 epoch", "a look that began before an event is remembered after it"),
        ("looks", "forgets_condemned_only", "I1", "H3 close", "looked at while condemned, remembered past the close"),
        # Pins.
        ("pins", "refs_before_condemn", "I2", "G4 refs", "a pin between the read of refs and G2"),
        ("pins", "refs_before_grace", "I2", "G4 refs", "a lagging holder pins after the read of refs, then announces"),
        ("pins", "pin_no_hold", "I2", "P1", "a pin is decided, a collector passes, the put lands late"),
        ("unpin", "unpin_blind", "I2", "P3", "a late unpin removes the next pin"),
        ("ppin", "pin_no_session", "I2", "P2", "a zombie's persistent pin lands after the grace ignored it"),
        # The fence and the trash.
        ("deposed", "no_fence+no_unlisted", "I1", "F1", "a woken collector renames a newer, held incarnation"),
        ("deposed", "close_before_fence+no_unlisted", "I1", "G6 order", "key deleted first, a rename lands in between"),
        ("deposed", "late_mkdir+no_unlisted", "I1", "F2", "an adopter makes the folder again after the rmdir"),
        ("deposed", "close_blind+no_unlisted", "I1", "G6 compare", "a repeated close deletes the next sweep's key"),
        ("deposed", "fence_drains", "I3", "F3 re-read", "restores the condemned one, and the newer one is dropped"),
        ("deposed", "no_incarnation", "I3", "G5 compare", "a late put is destroyed"),
        ("deposed", "fixed_trash_name", "I3", "G5 unique name", "a name is used again between look and unlink"),
        ("deposed", "restore_overwrites", "I3", "G5 link", "a restore renames over a newer one"),
        ("twoa", "abandon_keeps_fence", "I1", "F1", "abandons by deleting the key; whoever adopted the sweep goes on"),
        ("twoa", "condemn_compares_first", "I1", "G2 compare", "one transaction for two shards compares one key"),
        ("two3", "close_compares_first", "I1", "G6 compare", "one close for two shards compares one key"),
        ("join", "holds_unnamed", "I5", "A2", "a sweep waits for a hold that is never released"),
        ("join", "no_adopt", "I5", "G7", "the sweep of a dead collector never closes"),
        # Rollback of etcd, lost watches.
        ("c13", "no_start_fence", "I1", "C4", "a collector of the lost timeline reaps under a new session"),
        ("c13p", "no_chain", "I1", "C1, C2", "lost names of what is held, and the next announcement still succeeds"),
        ("c13p", "no_key_chain", "I2", "C2", "a lost pin, and the announcement still succeeds"),
        (
            "c13d",
            "no_seq_chain",
            "I1",
            "C1",
            "announces a revision of the lost timeline, holds what the new one condemned",
        ),
        ("two13", "no_seq_chain", "I1", "C1", "the same, with a second shard that is modelled in full"),
        ("c13p", "no_reread", "I1", "C3", "the collector of a lost sweep believes a newer announcement"),
        ("c13p", "split_read", "I2", "C3, G4", "the grace in the old timeline, the refs in the new one"),
        ("v3", "lost_watch_keeps_cache", "I1", "V3", "what the lost events condemned is still remembered"),
        ("v3", "lost_watch_keeps_looks", "I1", "V3, H3 epoch", "a look that began before the fresh read is remembered"),
        ("c13v", "lost_watch_keeps_births", "I1", "V3", "a birth in the lost timeline counts in the new one"),
        ("two13v", "lost_watch_keeps_births", "I1", "V3", "the same, with two shards"),
        ("c13v", "lost_watch_no_key_check", "I1", "V3, C2", "the fresh read hides that its announcement was lost"),
        ("two13v", "lost_watch_no_key_check", "I1", "V3, C2", "the same, with two shards"),
        # Damaged files.
        ("aside", "aside_by_unlink", "I3", "W3 rename", "the look was old: unlink destroys what was put there since"),
        ("aside", "aside_unlooked", "I3", "W3 look", "what was taken by mistake is deleted"),
        ("aside", "aside_emptied_unlooked", "I3", "W3 round", "a collector empties quarantine without looking"),
        ("aside", "aside_overwrites", "I3", "W3 link", "putting back renames over a newer one"),
        ("aside", "aside_restored_unlooked", "I4", "W3 look", "a damaged file goes back to its name"),
        ("aside", "aside_never_restored", "I5", "W3 round", "a whole file stays in quarantine for ever"),
        ("aside", "strict_after_damage", "I3", "(promise)", "a condemned one is put back and takes a newer one's name"),
        # Object stores.
        ("s3", "own_list", "I1", "O1", "two collectors with different lists"),
        ("s3", "s3_blind_delete", "I3", "O1 If-Match", "a newer incarnation is deleted"),
    )
)
