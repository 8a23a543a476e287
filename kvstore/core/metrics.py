"""Every counter and every gauge of a node, a worker or a client of workers, with its meaning.

A new one is a new line here: ``stats()``, the metrics and docs/metrics.md follow from it.  A name that is not
declared is an error of the type checker.
"""

from __future__ import annotations

import bisect
import enum
import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from kvstore.core import tracing


class Family(NamedTuple):
    """A metric with a label, which several counters make up."""

    metric: str
    label: str
    about: str


MISSES = Family("misses", "reason", "chunks or requests that were a miss, by why")
DAMAGE = Family("damage", "kind", "corrupt chunks found, by what is wrong with them")
DENIED = Family("denied", "reason", "calls denied, by why")
OPERATIONS = Family("operations", "outcome", "operations (prefetch, clear) that ended")
QUOTA_REFUSED = Family("quota_refused", "limit", "calls refused by a tenant's quota, by which limit")


class Counter(enum.Enum):
    """One counter. Only the enumerations below have members: what they do not declare cannot be counted."""

    __hash__ = object.__hash__  # members are single objects; the hash of Enum is slower, and each count needs one

    def __init__(self, about: str, family: Family | None = None, label: str = "") -> None:
        self.about = about
        """The counted events, in words."""
        self.family = family
        """The labelled metric that it is a part of; None for a metric of its own."""
        self.label = label
        """The value of that metric's label."""

    @property
    def flat_name(self) -> str:
        """Its name in ``stats()``."""
        return self.name.lower()


@enum.unique
class NodeCount(Counter):
    """The counters of a node."""

    REQUESTS_MATCH = "match calls, of prompts and of blocks"
    REQUESTS_GET = "get calls of prompts, blocks and holds, layer by layer and as views too; each once, however it goes"
    REQUESTS_PUT = "put calls, of prompts and of blocks"
    TOKENS_ASKED = "tokens that look-ups (match, hold, get without a hold) asked for, full chunks only"
    TOKENS_MATCHED = "tokens that these look-ups found in the store"
    CHUNKS_READ = "chunks read from the root for callers"
    CHUNKS_WRITTEN = "chunks this node published"
    CHUNKS_FOUND = "chunks a put found in the store already"
    CHUNKS_LOST_RACE = "chunks staged here while another writer published first"
    BYTES_READ = "payload bytes that callers got from the root; with memory_bytes, all that they got"
    BYTES_WRITTEN = "payload bytes published"
    MISS_ABSENT = "chunks that were not there when read", MISSES, "absent"
    MISS_DAMAGED = "chunks that failed verification (each is quarantined)", MISSES, "damaged"
    MISS_OTHER_SIZE = "engine-hashed blocks asked for with another size than they have", MISSES, "other_size"
    MISS_KEY = "chunks encrypted with a key that this node does not have", MISSES, "key"
    MISS_ENCODING = "compressed chunks on a node without zstandard", MISSES, "encoding"
    MISS_UNREADABLE = "chunks that could not be read (I/O error, no permission)", MISSES, "unreadable"
    MISS_DEADLINE = "requests cut short by their deadline", MISSES, "deadline"
    MISS_SHED = "requests refused because a queue was full or the root hung", MISSES, "shed"
    DAMAGE_SIZE = "files of another size than their chunk has", DAMAGE, "size"
    DAMAGE_MAGIC = "files that do not begin as a chunk does", DAMAGE, "magic"
    DAMAGE_VERSION = "chunks of an unknown version of the format", DAMAGE, "version"
    DAMAGE_ALGORITHM = "chunks with an unknown checksum", DAMAGE, "algorithm"
    DAMAGE_HEADER_CHECKSUM = "chunks whose header does not match its checksum", DAMAGE, "header_checksum"
    DAMAGE_IDENTITY = "chunks that are another one than their name says", DAMAGE, "identity"
    DAMAGE_GEOMETRY = "chunks with other sections than their namespace has", DAMAGE, "geometry"
    DAMAGE_SECTION_CHECKSUM = "chunks with a section that does not match its checksum", DAMAGE, "section_checksum"
    DAMAGE_SEAL = "encrypted chunks that their key does not open", DAMAGE, "seal"
    DAMAGE_ENCODING = "compressed chunks that do not give their sections", DAMAGE, "encoding"
    QUARANTINED = "corrupt files moved to quarantine"
    QUARANTINE_FAILED = "corrupt files that could not be moved to quarantine"
    QUARANTINE_RESTORED = "files quarantined by mistake in a race, and put back"
    KEYS_RELOADED = "times that a changed key file was taken over"
    KEYS_REFUSED = "times that a changed key file was refused, and the keys from before kept"
    BYTES_ENCRYPTED = "payload bytes encrypted, on their way to the root or the local disk"
    COMPRESSED_SAVED_BYTES = "payload bytes that compression saved on the root"
    REFRESHED = "chunks whose recency was renewed, or hints raised"
    REFRESH_DROPPED = "renewals dropped because the queue was full or the root refused"
    PUT_FAILED = "puts that ended with an error"
    PUT_REFUSED_FULL = "puts refused because the root is full, as a collector says, or larger than its bound"
    PUT_REFUSED_UNCOUNTED = "puts that waited in vain for eviction"
    HOLDS_EXPIRED = "holds that ended by their own deadline"
    CHUNKS_CONDEMNED = "chunks that count as absent because a sweep is taking them"
    ANNOUNCEMENTS = "revisions announced to collectors"
    USAGE_REPORTS = "reports to collectors of what was written and deleted"
    WATCHES_LOST = "times that what is condemned was read afresh"
    SESSIONS_LOST = "sessions in etcd that ended without being closed"
    MEMORY_HITS = "chunks that callers got from memory, those that were just brought there included"
    MEMORY_BYTES = "payload bytes that callers got from memory: copied, sent or mapped"
    MEMORY_MISSES = "chunks that a read looked for in memory, and that were not there, or wrong"
    MEMORY_EVICTED = "chunks evicted from memory because space was needed"
    MEMORY_FULL = "chunks that memory had no space for"
    MEMORY_DAMAGED = "chunks that were corrupted in memory (each is dropped); not those that arrived corrupt"
    MEMORY_DEMOTED = "chunks that memory gave up, kept on the local disk"
    BEHIND_WRITTEN = "chunks written to the root after their put was acknowledged"
    BEHIND_LOST = "chunks acknowledged that could not be written to the root in time"
    BEHIND_SHED = "chunks of puts for which memory, or the queue behind it, had no space"
    DISK_HITS = "chunks read from the local disk"
    DISK_BYTES = "bytes of chunks read from the local disk, headers included"
    DISK_WRITES = "chunks that memory gave up, written to the local disk"
    DISK_WRITE_BYTES = "bytes of chunks written to the local disk, headers included"
    DISK_EVICTED = "chunks evicted from the local disk because space was needed"
    DISK_FAILED = "errors of the local disk; after some in a row it is left alone for a while"
    DISK_DAMAGED = "chunks from the local disk that failed verification (each is removed)"
    PEERS_HITS = "chunks read from peers' memory"
    PEERS_BYTES = "bytes of chunks read from peers' memory, headers included"
    PEERS_MISSES = "chunks asked for that no peer gave in time"
    PEERS_FAILED = "reads that failed at a peer; it is left alone for a while"
    PEERS_DAMAGED = "chunks from peers that failed verification"
    PEERS_SYNCS = "times that this node reported to its peers what its memory holds"
    PEERS_DIGESTS = "digests written to show peers what memory holds, one for each shard that changed"
    PEERS_DIGEST_BYTES = "bytes of these digests"
    OPERATIONS_DONE = "operations (prefetch, clear) that were done", OPERATIONS, "done"
    OPERATIONS_FAILED = "operations that failed", OPERATIONS, "failed"
    OPERATIONS_CANCELLED = "operations that a caller, or the end of the store, cancelled", OPERATIONS, "cancelled"
    PEERS_READS_AFRESH = "times that what peers hold was read afresh"


@enum.unique
class WorkerCount(Counter):
    """The counters of a worker, without those of its node."""

    WIRE_BYTES_IN = "payload bytes received from clients"
    WIRE_BYTES_OUT = "payload bytes sent to clients"
    WIRE_DAMAGED = "streams of clients that did not match their checksums"
    CALLS_REFUSED = "calls refused because the worker was full or draining"
    CALLS_FAILED = "calls that ended by a defect of the worker (its log has the incident)"
    CALLS_CANCELLED = "calls whose client was gone before the end"
    CALLS_IDLE = "streams cancelled because their client moved nothing for too long, or never ended"
    BULK_CONNECTIONS = "bulk connections of clients that proved their grant"
    BULK_REFUSED = "bulk connections cut off: no grant, too many, garbage, or too slow to greet"
    DENIED_UNAUTHENTICATED = (
        "calls with neither a token nor a certificate that names a caller",
        DENIED,
        "unauthenticated",
    )
    DENIED_TOKEN_INVALID = "calls with a token that is not valid here", DENIED, "token_invalid"
    DENIED_TOKEN_EXPIRED = "calls with an expired token", DENIED, "token_expired"
    DENIED_TOKEN_REVOKED = "calls with a revoked token", DENIED, "token_revoked"
    DENIED_TOKEN_BINDING = "calls with a token that is bound to another certificate", DENIED, "token_binding"
    DENIED_UNKNOWN_IDENTITY = "calls of an identity that the access file does not name", DENIED, "unknown_identity"
    DENIED_METHOD = "calls of a method that is closed to all", DENIED, "method"
    DENIED_TENANT = "calls for a tenant in which the identity has no role", DENIED, "tenant"
    DENIED_ROLE = "calls for which the role of the identity is too low", DENIED, "role"
    REFUSED_REQUESTS_QUOTA = "calls refused: the tenant began too many in a second", QUOTA_REFUSED, "requests"
    REFUSED_BYTES_QUOTA = "calls refused: the tenant moved too many bytes in a second", QUOTA_REFUSED, "bytes"
    REFUSED_CALLS_QUOTA = "calls refused: the tenant had too many under way", QUOTA_REFUSED, "calls"
    REFUSED_PINS_QUOTA = "pins refused: the tenant had as many as it may", QUOTA_REFUSED, "pins"
    QUOTA_REFUSED = "calls refused because their tenant's quota was used up"
    AUDIT_LOST = "lines that could not be written into the audit log"
    ACCESS_RELOADS = "access files that were read again after they had changed"
    ACCESS_RELOAD_FAILURES = "access files that were wrong after they had changed: the rules before stay in force"


@enum.unique
class ClientCount(Counter):
    """The counters of a client of workers. Part of its ``stats()``, under names that begin with ``client_``."""

    MISSES_UNREACHABLE = "reads answered as a miss because no worker could be reached or answered in time"
    MISSES_DAMAGED = "reads cut short because bytes changed on the way"
    RETRIES = "calls sent again to another worker"
    SET_ASIDE = "times a worker was skipped for a while after failures"
    GETS_SHARED = "reads from memory of a worker of this host, or files that it handed over"
    GETS_TCP = "reads over a bulk connection"
    GETS_GRPC = "reads over gRPC"
    PUTS_SHARED = "puts through memory shared with a worker of this host"
    PUTS_TCP = "puts over a bulk connection"
    PUTS_GRPC = "puts over gRPC"
    BULK_BROKEN = "calls that went on over gRPC because a bulk connection broke"
    BULK_DAMAGED = "reads that went on over gRPC because a chunk that came by another way was not right"
    NAMESPACES_REOPENED = "times a namespace had to be opened again at a worker"

    @property
    def flat_name(self) -> str:
        """Its name in ``stats()``."""
        return f"client_{self.name.lower()}"


NODE_GAUGES = {
    "known_chunks": "chunks known to be on the root, so that a look-up need not ask it",
    "holds": "holds that have not ended",
    "operations_running": "operations (prefetch, clear) that are running",
    "operations_waiting": "operations that wait for a thread",
    "root_queue": "reads and writes of the root that wait for a thread",
    "root_hangs": "1 while the root does not answer",
    "keys_known": "keys of tenants that this node has, old ones included",
    "native_path": "1 where the C library is in use",
    "session_alive": "1 while the session in etcd lives",
    "protected": "1 while collectors respect what is held here",
    "etcd_silent_seconds": "since etcd last acknowledged a keepalive or a new session of this node",
    "lease_margin_seconds": "until the session ends unless etcd acknowledges a keepalive; 0 without one",
    "bound_bytes": "bytes that the root's files may take, as this process asks; 0 without a limit. The "
    "smallest of all living processes that have put something is in force, which may be less",
    "bound_used_bytes": "bytes that the root's files take now",
    "collecting": "1 while this process runs the collector of a root without etcd",
    "root_full": "1 while a collector says that the root is full, and puts are refused",
    "memory_size_bytes": "shared memory for hot chunks, all of it",
    "memory_chunks": "chunks in memory",
    "memory_held_bytes": "bytes of memory that chunks take, headers included",
    "memory_dirty_bytes": "bytes in memory that the root does not have yet",
    "memory_referenced_bytes": "bytes in memory that are in use",
    "memory_leased_bytes": "bytes in memory that clients of this host map and may read",
    "leases": "runs of chunks in memory that clients of this host may read",
    "behind_bytes": "bytes acknowledged that wait to be written to the root",
    "behind_bytes_max": "bytes that may wait to be written to the root; further puts wait, then are shed",
    "disk_entries": "chunks on the local disk",
    "disk_held_bytes": "bytes that files on the local disk take",
    "disk_bytes_max": "bytes that files on the local disk may take",
    "disk_refilling": "1 until all that the local disk held at the start is taken in",
    "peers_known": "other nodes that report what their memory holds",
    "peers_prints": "chunks that other nodes say they hold",
    "peers_aside": "other nodes that are left alone for a while after trouble",
}
"""The gauges of a node."""

STARTED = "started_timestamp_seconds"
"""The gauge that distinguishes two runs of one worker: no two have started at the same time."""

WORKER_GAUGES = {
    STARTED: "when the worker started, since the epoch",
    "calls_in_flight": "calls under way",
    "calls_max": "limit of calls under way; more are refused",
    "bytes_in_flight": "payload bytes of calls under way",
    "client_holds": "holds of clients that have not ended",
    "bulk_connections_open": "bulk connections of clients that are open",
    "root_free_bytes": "free bytes of what holds the root; absent if unknown",
    "root_total_bytes": "size of what holds the root; absent if unknown",
    "certificate_expires_seconds": "until the worker's certificate ends; only with TLS",
    "root_gone": "1 while the worker's URL does not lead to the root that it opened: unmounted, deleted or silent",
    "draining": "1 while the worker finishes what it accepted and takes no more",
}
"""The gauges of a worker, without those of its node."""

LEAST = frozenset(
    {STARTED, "root_free_bytes", "root_total_bytes", "lease_margin_seconds", "certificate_expires_seconds"}
)
MOST = frozenset({"etcd_silent_seconds", "root_full", "root_gone", "root_hangs", "bound_bytes", "bound_used_bytes"})
"""Gauges of several workers that are no sum: of the root that they share, or of the one that is worst off."""


C = TypeVar("C", bound=Counter)


class Counts(Generic[C]):
    """The counts of one enumeration since this object was made; thread-safe."""

    def __init__(self, declared: type[C]) -> None:
        self._lock = threading.Lock()  # guards the counts
        self._counts: dict[C, int] = dict.fromkeys(declared, 0)

    def add(self, counter: C, count: int = 1) -> None:
        """Adds to one counter."""
        with self._lock:
            self._counts[counter] += count

    def snapshot(self) -> dict[str, int]:
        """All counts at one moment, by their flat names."""
        with self._lock:
            counts = self._counts.copy()
        return {counter.flat_name: count for counter, count in counts.items()}


def merged(each: Iterable[Mapping[str, int | float]]) -> dict[str, int | float]:
    """Returns the counts of several workers as those of one: sums, except for gauges that are none."""
    found: dict[str, int | float] = {}
    for counts in each:
        for name, value in counts.items():
            if name in LEAST:
                found[name] = min(value, found.get(name, value))
            elif name in MOST:
                found[name] = max(value, found.get(name, value))
            else:
                found[name] = found.get(name, 0) + value
    return found


GROWING = {"etcd_operations": "calls to etcd"}
"""Counters that others keep: they come with the gauges, and are metrics of type counter."""


K = TypeVar("K", bound=Hashable)

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)

TierName = Literal["memory", "peers", "disk", "root"]
Operation = Literal["look", "read", "write"]
Step = tuple[TierName, Operation]


@dataclass(slots=True)
class Latency:
    """Durations of one kind of step: a count per bucket (the last: longer than all), their sum, and their bytes."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    sum_s: float = 0.0
    size_bytes: int = 0


class Latencies(Generic[K]):
    """One ``Latency`` per key; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[K, Latency] = {}

    def observe(self, key: K, seconds: float, size_bytes: int = 0) -> None:
        with self._lock:
            latency = self._found.get(key)
            if latency is None:
                latency = self._found[key] = Latency()
            latency.buckets[bisect.bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
            latency.sum_s += seconds
            latency.size_bytes += size_bytes

    def snapshot(self) -> dict[K, Latency]:
        with self._lock:
            return {key: Latency(list(one.buckets), one.sum_s, one.size_bytes) for key, one in self._found.items()}


class Timed:
    """One step of a tier. A class, not a generator, because it is entered for every group of chunks."""

    __slots__ = ("_began_s", "_key", "_latencies", "_span", "size_bytes")

    def __init__(self, latencies: Latencies[Step], key: Step) -> None:
        self._latencies = latencies
        self._key = key
        self.size_bytes = 0

    def __enter__(self) -> Timed:
        self._span: AbstractContextManager[Any] | None = None
        if tracing.tracer is not None:
            self._span = tracing.span(".".join(("kvstore", *self._key)))
            self._span.__enter__()
        self._began_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._latencies.observe(self._key, time.perf_counter() - self._began_s, self.size_bytes)
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)


class Counters(Counts[NodeCount]):
    """The counts of a node since it started."""

    def __init__(self) -> None:
        super().__init__(NodeCount)
        self.tiers: Latencies[Step] = Latencies()
        """Steps of the tiers: how often, how long, how many bytes."""

    def timed(self, tier: TierName, operation: Operation) -> Timed:
        """Times one step of a tier; set its ``size_bytes`` to the bytes that were moved."""
        return Timed(self.tiers, (tier, operation))

    def add_read(self, payload_bytes: int, chunks: int = 1) -> None:
        """Adds ``chunks`` that a caller got from the root, of ``payload_bytes`` in all."""
        with self._lock:
            self._counts[NodeCount.CHUNKS_READ] += chunks
            self._counts[NodeCount.BYTES_READ] += payload_bytes

    def add_lookup(self, asked: int, found: int, chunk_tokens: int, *, is_match: bool) -> None:
        """Counts a look-up for ``asked`` chunks or blocks: a match, a hold, or a get without a hold."""
        with self._lock:
            self._counts[NodeCount.TOKENS_ASKED] += asked * chunk_tokens
            self._counts[NodeCount.TOKENS_MATCHED] += found * chunk_tokens
            self._counts[NodeCount.REQUESTS_MATCH] += is_match
