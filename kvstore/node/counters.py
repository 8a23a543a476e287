"""Counts of what a node did; the numbers behind ``stats()`` and the metrics."""

from __future__ import annotations

import threading

from kvstore.node.timings import Operation, TierName, TierTimings, Timed

COUNTERS = {
    "requests_match": "match calls",
    "requests_get": "reads of a hold or prompt",
    "requests_put": "put calls",
    "tokens_asked": "tokens in match calls, full chunks only",
    "tokens_matched": "tokens that match found",
    "chunks_read": "chunks read and verified",
    "chunks_written": "chunks this node published",
    "chunks_found": "chunks a put found in the store already",
    "chunks_lost_race": "chunks staged here while another writer published first",
    "bytes_read": "payload bytes read and verified",
    "bytes_written": "payload bytes published",
    "miss_absent": "chunks that were not there when read",
    "miss_damaged": "chunks that failed verification (each is set aside)",
    "miss_other_size": "engine-hashed blocks asked for with another size than they have",
    "miss_key": "chunks encrypted with a key that this node does not have",
    "miss_encoding": "compressed chunks on a node without zstandard",
    "miss_unreadable": "chunks that could not be read (I/O error, no permission)",
    "miss_deadline": "requests cut short by their deadline",
    "miss_shed": "requests refused because a queue was full or the root hung",
    "quarantined": "damaged files set aside",
    "quarantine_failed": "damaged files that could not be set aside",
    "quarantine_restored": "files set aside by mistake in a race, and put back",
    "keys_reloaded": "times that a changed key file was taken over",
    "keys_refused": "times that a changed key file was refused, and the keys from before kept",
    "bytes_encrypted": "payload bytes encrypted, on their way to the root or the local disk",
    "chunks_recoded": "chunks on the root rewritten compressed, decompressed or with another key",
    "recoded_saved_bytes": "bytes by which these became smaller",
    "refreshed": "chunks whose recency was renewed, or hints raised",
    "refresh_dropped": "renewals dropped because the queue was full or the root refused",
    "put_failed": "puts that ended with an error",
    "put_refused_full": "puts refused because a collector says that the root is full",
    "put_refused_uncounted": "puts refused until a collector has counted what this node wrote",
    "holds_expired": "holds that ended by their own deadline",
    "chunks_condemned": "chunks that count as absent because a sweep is taking them",
    "announcements": "revisions announced to collectors",
    "usage_reports": "reports to collectors of what was written and deleted",
    "watches_lost": "times that what is condemned was read afresh",
    "sessions_lost": "sessions in etcd that ended without being closed",
    "memory_hits": "chunks served from memory, those that a peer or the disk has just given included",
    "memory_bytes": "bytes of chunks served from memory that this node copied or mapped itself, headers included",
    "memory_misses": "chunks that a read looked for in memory, and that were not there, or wrong",
    "memory_evicted": "chunks that left memory because their room was needed",
    "memory_full": "chunks that memory had no room for",
    "memory_damaged": "chunks that went wrong in memory (each is dropped); not those that came there damaged",
    "memory_demoted": "chunks that memory gave up, kept on the local disk",
    "behind_written": "chunks written to the root after their put was acknowledged",
    "behind_lost": "chunks acknowledged that could not be written to the root in time",
    "behind_shed": "chunks of puts for which memory, or the queue behind it, had no room",
    "disk_hits": "chunks read from the local disk",
    "disk_bytes": "bytes of chunks read from the local disk, headers included",
    "disk_writes": "chunks that memory gave up, written to the local disk",
    "disk_write_bytes": "bytes of chunks written to the local disk, headers included",
    "disk_evicted": "chunks that left the local disk because their room was needed",
    "disk_failed": "errors of the local disk; after some in a row it is left alone for a while",
    "disk_damaged": "chunks from the local disk that failed verification (each is removed)",
    "peers_hits": "chunks read from peers' memory",
    "peers_bytes": "bytes of chunks read from peers' memory, headers included",
    "peers_misses": "chunks asked for that no peer gave in time",
    "peers_failed": "reads that failed at a peer; it is left alone for a while",
    "peers_damaged": "chunks from peers that failed verification",
    "peers_syncs": "times that this node told its peers what its memory holds",
    "peers_digests": "digests written to tell peers what memory holds, one for each shard that changed",
    "peers_digest_bytes": "bytes of these digests",
    "peers_reads_afresh": "times that what peers hold was read afresh",
}
"""Every counter with what it counts. Damage by kind is added as ``damage_<kind>``."""

GAUGES = {
    "known_chunks": "chunks known to be on the root, so that a look-up need not ask it",
    "holds": "holds that have not ended",
    "lane_queue": "reads and writes of the root that wait for a thread",
    "root_hangs": "1 while the root does not answer",
    "keys_known": "keys of tenants that this node has, old ones included",
    "native_path": "1 where the C library is in use",
    "session_alive": "1 while the session in etcd lives",
    "protected": "1 while collectors respect what is held here",
    "etcd_operations": "calls to etcd",
    "etcd_silent_seconds": "since etcd last acknowledged a keepalive or a new session of this node",
    "lease_margin_seconds": "until the session ends unless etcd acknowledges a keepalive; 0 without one",
    "root_full": "1 while a collector says that the root is full, and puts are refused",
    "memory_size_bytes": "shared memory for hot chunks, all of it",
    "memory_chunks": "chunks in memory",
    "memory_held_bytes": "bytes of memory that chunks take, headers included",
    "memory_dirty_bytes": "bytes in memory that the root does not have yet",
    "memory_referenced_bytes": "bytes in memory that somebody uses now",
    "memory_pinned_bytes": "bytes in memory that are pinned",
    "memory_leased_bytes": "bytes in memory that clients of this host map and may read",
    "leases": "runs of chunks in memory that clients of this host may read",
    "behind_bytes": "bytes acknowledged that wait to be written to the root",
    "behind_bytes_max": "bytes that may wait so; puts that find no room are written through or shed",
    "disk_entries": "chunks on the local disk",
    "disk_held_bytes": "bytes that files on the local disk take",
    "disk_bytes_max": "bytes that files on the local disk may take",
    "disk_refilling": "1 until all that the local disk held at the start is taken in",
    "peers_known": "other nodes that tell what their memory holds",
    "peers_prints": "chunks that other nodes say they hold",
    "peers_aside": "other nodes that are left alone for a while after trouble",
}
"""Every number of how things stand now, with what it says."""


class Counters:
    """Monotonic counts since the node started; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self.tiers = TierTimings()
        """How long the tiers take."""

    def timed(self, tier: TierName, operation: Operation) -> Timed:
        """Around one step of a tier."""
        return self.tiers.timed(tier, operation)

    def add(self, name: str, count: int = 1) -> None:
        """Adds to one counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def add_read(self, payload_bytes: int, chunks: int = 1) -> None:
        """Chunks read and verified, ``payload_bytes`` in all."""
        with self._lock:
            self._counts["chunks_read"] += chunks
            self._counts["bytes_read"] += payload_bytes

    def snapshot(self) -> dict[str, int]:
        """All counts at one moment."""
        with self._lock:
            return dict(self._counts)
