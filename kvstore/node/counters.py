"""Counts of what a node did; the numbers behind ``stats()`` and the metrics."""

from __future__ import annotations

import threading

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
    "miss_unreadable": "chunks that could not be read (I/O error, no permission)",
    "miss_deadline": "requests cut short by their deadline",
    "miss_shed": "requests refused because a queue was full or the root hung",
    "quarantined": "damaged files set aside",
    "quarantine_failed": "damaged files that could not be set aside",
    "quarantine_restored": "files set aside by mistake in a race, and put back",
    "refreshed": "chunks whose recency was renewed, or hints raised",
    "refresh_dropped": "renewals dropped because the queue was full or the root refused",
    "put_failed": "puts that ended with an error",
    "put_refused_full": "puts refused because a collector says that the root is full",
    "holds_expired": "holds that ended by their own deadline",
    "chunks_condemned": "chunks that count as absent because a sweep is taking them",
    "announcements": "revisions announced to collectors",
    "watches_lost": "times that what is condemned was read afresh",
    "sessions_lost": "sessions in etcd that ended without being closed",
    "memory_hits": "chunks served from memory, verified by whoever got them",
    "memory_bytes": "bytes of those that this node copied or mapped itself, headers included",
    "memory_misses": "chunks asked for in memory that were not there, or wrong",
    "memory_evicted": "chunks that left memory because their room was needed",
    "memory_full": "chunks that memory had no room for",
    "memory_damaged": "chunks in memory that failed verification (each is dropped)",
    "memory_demoted": "chunks that memory gave up, kept on the local disk",
    "behind_written": "chunks written to the root after their put was acknowledged",
    "behind_lost": "chunks acknowledged that could not be written to the root in time",
    "behind_shed": "chunks of puts for which memory, or the queue behind it, had no room",
    "disk_hits": "chunks read from the local disk",
    "disk_bytes": "bytes of them, headers included",
    "disk_writes": "chunks that memory gave up, written to the local disk",
    "disk_write_bytes": "bytes of them, headers included",
    "disk_evicted": "chunks that left the local disk because their room was needed",
    "disk_failed": "errors of the local disk; after some in a row it is left alone for a while",
    "disk_damaged": "chunks from the local disk that failed verification (each is removed)",
    "peers_hits": "chunks read from peers' memory",
    "peers_bytes": "bytes of them, headers included",
    "peers_misses": "chunks asked for that no peer gave in time",
    "peers_failed": "reads that failed at a peer; it is left alone for a while",
    "peers_damaged": "chunks from peers that failed verification",
    "peers_syncs": "times that this node told its peers what its memory holds",
    "peers_digests": "digests written for that",
    "peers_digest_bytes": "bytes of them",
    "peers_reads_afresh": "times that what peers hold was read afresh",
}
"""Every counter with what it counts. Damage by kind is added as ``damage_<kind>``."""


class Counters:
    """Monotonic counts since the node started; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)

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
