"""The metadata store: its operations, limits and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvstore.core.clock import Clock, SystemClock
from kvstore.errors import InvalidRequest

# The end of one call, shared out among the requests that it makes.


TIMEOUT_S = 5.0
TIMEOUT_S_MAX = 3600.0
TRIES_MAX = 3  # of a transaction whose outcome stays unknown, before the call raises
_LEAST_S = 0.001


class EtcdDeadline:
    """``timeout_s`` from now (5 s if None), on ``clock``. Raises InvalidRequest outside 0 to 3600 s."""

    def __init__(self, timeout_s: float | None, clock: Clock | None = None) -> None:
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        if not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            raise InvalidRequest(
                f"timeout_s={timeout_s!r}: expected seconds, more than 0 and at most {TIMEOUT_S_MAX:g}"
            )
        self._clock = clock or SystemClock()
        self._ends_s = self._clock.monotonic_s() + self.timeout_s

    @property
    def over(self) -> bool:
        return self._clock.monotonic_s() >= self._ends_s

    def left_s(self, share: float = 1.0) -> float:
        """Returns ``share`` of the time left, as the timeout of a request; never zero, so that a late request fails by
        itself.

        A request whose lost reply has to be read back gets less than all, or there would be no time to read.
        """
        return max(_LEAST_S, share * (self._ends_s - self._clock.monotonic_s()))


# The metadata store: a small key-value store with revisions, compare-and-set, leases and watches.
#
# Everything that nodes agree on (namespaces, sessions, workers, pins, locks) is written once over this interface;
# ``etcd`` and ``memory`` implement it. Semantics are etcd v3's: one linear history of revisions, a transaction is
# atomic, a key written under a lease disappears with it.


LeaseId = NewType("LeaseId", int)
NO_LEASE = LeaseId(0)


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as read. ``create_revision`` stays over rewrites, ``mod_revision`` is that of the last write."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds when the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Holds when the key exists and was last written at ``mod_revision``, which is 1 or more.

    Raises ValueError for 0: etcd would take it for a key that does not exist, which is ``Absent``.
    """

    key: str
    mod_revision: int

    def __post_init__(self) -> None:
        if self.mod_revision < 1:
            raise ValueError(f"mod_revision is {self.mod_revision}; revisions begin at 1. For no key, use Absent")


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds when the key exists with exactly this value."""

    key: str
    value: bytes


Compare = Absent | ModifiedAt | ValueIs


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key, under a lease if one is given."""

    key: str
    value: bytes
    lease: LeaseId = NO_LEASE


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; deleting an absent key is not an error."""

    key: str


@dataclass(frozen=True, slots=True)
class TxnResult:
    """``revision`` is the store's after that transaction: if it succeeded, the mod_revision of the keys that it put."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A consistent read of a prefix at ``revision``, sorted by key."""

    items: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change seen by a watch. ``kv`` is None for a deletion (an expired lease deletes its keys at one revision)."""

    key: str
    kv: KeyValue | None
    revision: int


class Watch(Protocol):
    """A stream of changes under one prefix, in order, with a revision's events together."""

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        """Returns the next batch of events (never splits a revision), or None if none came within ``timeout_s``.

        Reconnects by itself from the last revision handed out. Raises WatchLost if the stream cannot continue from
        there, or the store refuses to watch the prefix; read the prefix afresh (rule V3).
        """
        ...

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        ...


class WatchLost(Exception):
    """The watch cannot continue without a gap (compacted, cancelled, disconnected for too long, closed)."""


class LeaseGone(Exception):
    """A put named a lease that does not exist (any more); nothing was written."""


class MetadataStore(Protocol):
    """Every call returns or raises within ``timeout_s``; if it is not given, a default from construction holds.

    Raises Unavailable if no member answered in time. A transaction may then have taken effect: its outcome is unknown,
    and the caller reads back. Raises PermissionDenied for refused credentials, InvalidRequest for a request over a
    limit below, LeaseGone for a put under a lease that does not exist. After ``close`` every call raises
    Unavailable.
    """

    @property
    def operations_count(self) -> int:
        """Number of calls made so far; a test shows that no chunk costs one."""
        ...

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        """Reads one key, linearizable."""
        ...

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        """Reads all keys under ``prefix``, linearizable, paged inside, at one revision.

        The pages are read one after the other. A store restored from a snapshot in between can mix two histories, so a
        reader whose safety depends on one read repeats its decisive keys afterwards.
        """
        ...

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        """Returns the number of keys under ``prefix``, linearizable; reads and sends no value."""
        ...

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        """Applies ``operations`` if all ``compares`` hold, all at one revision. A key occurs once among ``operations``.

        Never sent again once it may have been sent.
        """
        ...

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        """Writes one key (idempotent, retried within the deadline); returns the revision."""
        ...

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """Deletes one key; True if this call's attempt saw it exist."""
        ...

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        """Grants a new lease of ``ttl_s`` seconds (whole, at least 1; the store may give a little more, never less)."""
        ...

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        """Renews a lease once; False if it no longer exists."""
        ...

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        """Ends a lease and deletes its keys; no error if it is gone already."""
        ...

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Watches changes under ``prefix`` from ``from_revision`` (1 or more) on; connects after it returns."""
        ...

    def close(self) -> None:
        """Releases connections and threads. Idempotent."""
        ...


# Limits on one request, the same for every store, so that what memory accepts etcd accepts too.
#
# They are etcd's defaults (1.5 MiB a request, 128 operations a transaction) with room left for the envelope.


KEY_BYTES_MAX = 4096
REQUEST_BYTES_MAX = 1_500_000
OPERATIONS_MAX = 128
LEASE_TTL_S_MAX = 365 * 86_400


def check_request(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> None:
    """Raises InvalidRequest if a transaction is over a limit or names a key twice."""
    if len(compares) > OPERATIONS_MAX or len(operations) > OPERATIONS_MAX:
        raise InvalidRequest(
            f"a transaction has {len(compares)} compares and {len(operations)} operations, over the limit of "
            f"{OPERATIONS_MAX} each: split it"
        )
    keys = [operation.key for operation in operations]
    if len(set(keys)) != len(keys):
        raise InvalidRequest("a transaction writes or deletes a key twice: name each key once")
    size = sum(len(operation.value) for operation in operations if isinstance(operation, Put))
    size += sum(len(compare.value) for compare in compares if isinstance(compare, ValueIs))
    for key in keys + [compare.key for compare in compares]:
        size += check_key(key)
    if size > REQUEST_BYTES_MAX:
        raise InvalidRequest(
            f"a request to the metadata store has {size} bytes, over the limit of {REQUEST_BYTES_MAX}: "
            "store less in one key, or split it over several"
        )


def check_key(key: str) -> int:
    """Returns the size of ``key`` in bytes. Raises InvalidRequest for an empty or oversized key."""
    size = len(key.encode())
    if not 1 <= size <= KEY_BYTES_MAX:
        raise InvalidRequest(f"a metadata key has {size} bytes: expected 1 to {KEY_BYTES_MAX}")
    return size


def check_ttl(ttl_s: int) -> None:
    """Raises InvalidRequest if ``ttl_s`` is not a whole number of seconds from 1 to a year."""
    if not 1 <= ttl_s <= LEASE_TTL_S_MAX:
        raise InvalidRequest(f"lease ttl_s={ttl_s!r}: expected a whole number from 1 to {LEASE_TTL_S_MAX}")


def check_from_revision(revision: int) -> None:
    """Raises InvalidRequest if a watch would start before the first revision (0 means 'now' to etcd)."""
    if revision < 1:
        raise InvalidRequest(f"watch from_revision={revision}: expected 1 or more, such as a snapshot's revision + 1")
