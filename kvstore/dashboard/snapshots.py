"""The sources of the dashboard: the cluster in etcd, the root, and the plan of the collector."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core.clock import RandomIds
from kvstore.core.namespace import Namespace
from kvstore.core.recency import NS_PER_S
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.meta.cluster import bound_root, known_roots
from kvstore.meta.keys import Keys
from kvstore.meta.pins import Pins, StoredPin
from kvstore.meta.session import Session, SessionRecord
from kvstore.meta.store import MetadataStore
from kvstore.meta.sweeps import Condemned
from kvstore.meta.usage import Capacity
from kvstore.meta.workers import WorkerRecord, WorkerRegistry
from kvstore.root.identity import RootIdentity, create_or_open
from kvstore.root.interface import Root, StorageSpace

# The plan of garbage collection, made by the collector as a separate program that changes nothing.
#
# The collector is never imported: the store does not depend on it, and a plan over a large root takes memory and time
# that a separate process gives back.


PLAN_S_MAX = 300.0
STDERR_CHARACTERS_MAX = 400


class PlanSource:
    """Runs ``kvstore-gc --once --dry-run --json``. ``command`` is its command line; None if there is no collector."""

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = None if command is None else [*command, "--once", "--dry-run", "--json"]
        self._child: subprocess.Popen[str] | None = None

    def plan(self) -> dict[str, Any]:
        """Returns the summary that ``kvstore-gc --dry-run --json`` prints. Raises Unavailable if there is none."""
        if self._command is None:
            raise Unavailable("the garbage collector is not installed here, so there is no plan: install kvstore-gc")
        try:
            child = self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as cause:
            raise Unavailable(f"the collector could not be started: {cause}") from cause
        with child:
            try:
                said, complaint = child.communicate(timeout=PLAN_S_MAX)
            except subprocess.TimeoutExpired as cause:
                raise Unavailable(
                    f"the collector made no plan within {PLAN_S_MAX:g} s: check that the root answers"
                ) from cause
            finally:
                child.kill()
        try:
            found = parse_json(said)
        except ValueError as cause:
            why = " ".join(complaint.split())[-STDERR_CHARACTERS_MAX:] or f"exit code {child.returncode}"
            raise Unavailable(f"the collector could not make a plan: {why}") from cause
        if not isinstance(found, dict):
            raise Unavailable("the collector printed no plan: check that its version is the dashboard's")
        return found

    def close(self) -> None:
        """Ends a running plan. Idempotent."""
        if self._child is not None:
            self._child.kill()


# The cluster as etcd knows it: namespaces, sessions, workers, collectors, sweeps, and the number of pins.
#
# It reads ranges that stay small at any size of the cluster, and leaves out what peers publish about their memory.
# The pins themselves, which carry addresses, are a separate feed that is read only while a page requests it.


TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class SessionSeen:
    """One live session: of a worker if it has a record, else of an engine that is a node itself."""

    id: str
    worker: WorkerRecord | None
    announced: int | None
    """The revision up to which it follows collectors; None if its key cannot be read."""
    began_revision: int


@dataclass(frozen=True, slots=True)
class SweepSeen:
    """One sweep in flight: its part of the addresses, and how many chunks it condemns."""

    part: int
    victims_count: int | None


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster in etcd at one moment, or nearly so."""

    root: bytes
    revision: int
    sessions: tuple[SessionSeen, ...]
    collectors: tuple[str, ...]
    namespaces: tuple[Namespace, ...]
    odd_namespaces_count: int
    """Number of records that could not be read."""
    pins_count: int
    sweeps: tuple[SweepSeen, ...]
    capacity: Capacity | None = None
    """The space of the root as a collector publishes it; None if none runs as a service."""

    @property
    def is_full(self) -> bool:
        """True while a collector publishes that the root is too full to write to."""
        return self.capacity is not None and self.capacity.is_full


class EtcdSource:
    """Reads the cluster of the root at ``url`` through one connection. ``open_meta`` is called by the first read."""

    def __init__(self, open_meta: Callable[[], MetadataStore], url: str) -> None:
        self._open_meta = open_meta
        self._url = url
        self._lock = threading.Lock()
        self._meta: MetadataStore | None = None
        self._root: bytes | None = None

    def learn(self, root: bytes) -> None:
        """Takes over the id that the root itself has."""
        self._root = root

    def root_id(self) -> bytes:
        """Returns the root's id: as its FORMAT says, else as etcd knows it by URL, else etcd's only root.

        The last two are for a root that does not answer: the page must still show the cluster. Raises Unavailable if
        the id is not known (yet), and PermissionDenied.
        """
        if self._root is not None:
            return self._root
        meta = self._connected()
        if (bound := bound_root(meta, self._url, TIMEOUT_S)) is not None:
            return bound
        found = known_roots(meta, TIMEOUT_S)
        if len(found) == 1:
            return found[0]
        raise Unavailable(f"the root is unknown: it does not answer, and etcd knows {len(found)} roots at other URLs")

    def cluster(self) -> ClusterSnapshot:
        """Reads everything but the pins. Raises Unavailable, PermissionDenied."""
        meta = self._connected()
        keys = Keys(self.root_id())
        workers = WorkerRegistry(meta, keys).list(TIMEOUT_S)
        sessions = meta.list(keys.sessions, TIMEOUT_S)
        seen = [
            SessionSeen(each.hex(), workers.get(each), _announced(kv.value), kv.create_revision)
            for kv in sessions.items
            if (each := keys.parse_session(kv.key)) is not None
        ]
        namespaces, odd_count = _namespaces(meta, keys)
        collectors = (keys.parse_session(kv.key) for kv in meta.list(keys.collectors, TIMEOUT_S).items)
        return ClusterSnapshot(
            keys.root_id,
            sessions.revision,
            tuple(seen),
            tuple(each.hex() for each in collectors if each is not None),
            namespaces,
            odd_count,
            meta.count(keys.refs, TIMEOUT_S),
            _sweeps(meta, keys),
            _capacity(meta, keys),
        )

    def pins(self) -> tuple[StoredPin, ...]:
        """Reads all pins. Raises Unavailable, PermissionDenied, RootMismatch."""
        return Pins(self._connected(), Keys(self.root_id()), _no_session).list(timeout_s=2 * TIMEOUT_S)

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        with self._lock:
            if self._meta is not None:
                self._meta.close()

    def _connected(self) -> MetadataStore:
        with self._lock:  # several feeds share it
            if self._meta is None:
                self._meta = self._open_meta()
            return self._meta


def _no_session() -> Session:
    raise InvalidRequest("the dashboard only reads: it has no session to pin under")


def _announced(value: bytes) -> int | None:
    try:
        return SessionRecord.from_json(value).announced
    except InvalidRequest:
        return None  # of another version


def _namespaces(meta: MetadataStore, keys: Keys) -> tuple[tuple[Namespace, ...], int]:
    found, odd_count = [], 0
    for kv in meta.list(keys.namespace_digests, TIMEOUT_S).items:
        try:
            found.append(Namespace.from_json(kv.value))
        except KVStoreError:
            odd_count += 1  # one bad record must not hide the others
    return tuple(sorted(found, key=lambda one: (one.tenant, one.name, one.digest))), odd_count


def _capacity(meta: MetadataStore, keys: Keys) -> Capacity | None:
    found = meta.get(keys.gc_capacity, TIMEOUT_S)
    try:
        return None if found is None else Capacity.from_json(found.value)
    except InvalidRequest:
        return None  # of another version


def _sweeps(meta: MetadataStore, keys: Keys) -> tuple[SweepSeen, ...]:
    found = []
    for kv in meta.list(keys.condemned, TIMEOUT_S).items:
        part = keys.parse_condemned(kv.key)
        if part is None:
            continue
        try:
            victims_count: int | None = Condemned.from_bytes(kv.value).victims_count
        except RootMismatch:
            victims_count = None
        found.append(SweepSeen(part, victims_count))
    return tuple(found)


# The root as it describes itself: its identity, its room, and the files in its quarantine.


QUARANTINE_MAX = 10_000
"""Limit on the files counted."""
DAMAGED_MAX = 200
"""Limit on the files named, the last used ones first."""


@dataclass(frozen=True, slots=True)
class RootSeen:
    """The root at one moment."""

    url: str
    identity: RootIdentity
    space: StorageSpace


@dataclass(frozen=True, slots=True)
class SetAside:
    """One file in quarantine. ``session`` put it there; ``last_use_s`` is roughly its mtime."""

    address: str
    session: str
    size_bytes: int
    last_use_s: float


@dataclass(frozen=True, slots=True)
class QuarantineReport:
    """The files that nodes quarantined as damaged. ``is_whole`` is false if there are more than were counted."""

    count: int
    size_bytes: int
    is_whole: bool
    newest: tuple[SetAside, ...]


class RootSource:
    """Looks at the root. The first look calls ``open_root``, because it may hang."""

    def __init__(self, open_root: Callable[[], Root], learn: Callable[[bytes], object]) -> None:
        self._open_root = open_root
        self._learn = learn
        self._root: Root | None = None
        self._identity: RootIdentity | None = None

    def seen(self) -> RootSeen:
        """Returns identity and room. Raises RootMismatch if it is not a root, and the root's errors."""
        root, identity = self.opened()
        return RootSeen(root.url, identity, root.space())

    def quarantine(self) -> QuarantineReport:
        """Returns the quarantined files. Raises the root's errors."""
        root, _ = self.opened()
        found: list[SetAside] = []
        count = size_bytes = 0
        for entry in root.list(places.QUARANTINE):
            if entry.stat is None:
                continue
            count += 1
            size_bytes += entry.stat.size_bytes
            address, _, rest = entry.name.partition(".")
            found.append(
                SetAside(address, rest.partition(".")[0], entry.stat.size_bytes, entry.stat.mtime_ns / NS_PER_S)
            )
            if count == QUARANTINE_MAX:
                break
        found.sort(key=lambda each: -each.last_use_s)
        return QuarantineReport(count, size_bytes, count < QUARANTINE_MAX, tuple(found[:DAMAGED_MAX]))

    def opened(self) -> tuple[Root, RootIdentity]:
        """Returns the root and its identity. Raises as ``seen``."""
        if self._root is None:
            self._root = self._open_root()
        if self._identity is None:
            self._identity = create_or_open(self._root, RandomIds(), create=False)
            self._learn(self._identity.root)
        return self._root, self._identity

    def close(self) -> None:
        """Releases the root. Idempotent."""
        if self._root is not None:
            self._root.close()
