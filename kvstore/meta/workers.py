"""The registry of workers that serve a root, and their addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, SessionLost
from kvstore.meta.keys import Keys, SessionId, parse_id
from kvstore.meta.session import Session
from kvstore.meta.store import Delete, KeyValue, LeaseGone, MetadataStore, Put, Snapshot, Watch


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's record of itself. ``address`` is ``host:port`` as clients reach it."""

    address: str
    version: str = ""
    host: str = ""
    pid: int = 0

    def __post_init__(self) -> None:
        if not self.address:
            raise InvalidRequest("worker address is empty: give host:port as clients reach it")

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> WorkerRecord:
        """Parses what ``to_json`` returned; ignores newer fields. Raises InvalidRequest for anything else."""
        try:
            fields = parse_json(value)
            return cls(
                str(fields["address"]),
                str(fields.get("version", "")),
                str(fields.get("host", "")),
                int(fields.get("pid", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise InvalidRequest(f"not a worker record: {cause}") from cause


class WorkerRegistry:
    """The workers of one root."""

    def __init__(self, meta: MetadataStore, keys: Keys) -> None:
        self._meta = meta
        self._keys = keys

    def register(self, session: Session, record: WorkerRecord, timeout_s: float | None = None) -> None:
        """Lists the worker for as long as ``session`` lives. Raises SessionLost, Unavailable."""
        session.put(self._keys.worker(session.id), record.to_json(), timeout_s)

    def deregister(self, session: Session, timeout_s: float | None = None) -> None:
        """Takes the worker off the list, so that clients turn to others while it drains."""
        self._meta.delete(self._keys.worker(session.id), timeout_s)

    def list(self, timeout_s: float | None = None) -> dict[SessionId, WorkerRecord]:
        """Returns the workers with a live session, except those whose record cannot be read (of a future version)."""
        found: dict[SessionId, WorkerRecord] = {}
        for kv in self._meta.list(self._keys.workers, timeout_s).items:
            session = self._keys.parse_session(kv.key)
            if session is None:
                continue
            try:
                found[session] = WorkerRecord.from_json(kv.value)
            except InvalidRequest:
                continue
        return found


# The keys that nodes with memory share: where they serve it, and digests of its content.
#
# Only the peers know what the bytes of a digest mean.


SHARDS = 64
"""Parts of the address space, by the first six bits of an address."""


@dataclass(frozen=True, slots=True)
class AddressTold:
    """The address of a session's memory; None if no longer served. ``since`` orders the sessions of one address."""

    session: SessionId
    address: str | None
    since: int


@dataclass(frozen=True, slots=True)
class DigestTold:
    """The digest of a session's memory in one shard; None if it holds nothing there."""

    session: SessionId
    shard: int
    value: bytes | None


PeerUpdate = AddressTold | DigestTold


class Digests:
    """The peers of one root."""

    def __init__(self, meta: MetadataStore, keys: Keys) -> None:
        self._meta = meta
        self._keys = keys

    def publish(
        self, session: Session, digests: Mapping[int, bytes], record: WorkerRecord | None, timeout_s: float
    ) -> None:
        """Writes digests by shard (an empty one takes its key away), and the record if given, all at one revision.

        Raises SessionLost, Unavailable (it may have been written: writing it again does no harm), InvalidRequest over
        the limits of one request.
        """
        session.check()
        operations: list[Put | Delete] = []
        if record is not None:
            operations.append(Put(self._keys.peer_address(session.id), record.to_json(), session.lease))
        for shard, value in digests.items():
            key = self._keys.peer_digest(session.id, shard)
            operations.append(Put(key, value, session.lease) if value else Delete(key))
        try:
            self._meta.txn((), operations, timeout_s)
        except LeaseGone as gone:
            raise SessionLost(f"session {session.id.hex()} ended: publish again in a new one") from gone

    def withdraw(self, session: Session, timeout_s: float) -> None:
        """Stops other nodes from reading this worker's memory, before it stops. Raises Unavailable."""
        self._meta.delete(self._keys.peer_address(session.id), timeout_s)

    def snapshot(self, timeout_s: float) -> Snapshot:
        return self._meta.list(self._keys.peers, timeout_s)

    def watch(self, from_revision: int) -> Watch:
        return self._meta.watch(self._keys.peers, from_revision)

    def read(self, key: str, found: KeyValue | None) -> PeerUpdate | None:
        """Parses a key as found, None if it is gone; returns None for a key that this version does not know."""
        owner, _, what = key.removeprefix(self._keys.peers).partition("/")
        session = parse_id(owner)
        if session is None:
            return None
        if what == "address":
            return _address_told(SessionId(session), found)
        shard = _shard_of(what)
        return None if shard is None else DigestTold(SessionId(session), shard, None if found is None else found.value)


def _address_told(session: SessionId, found: KeyValue | None) -> AddressTold:
    if found is None:
        return AddressTold(session, None, 0)
    try:
        return AddressTold(session, WorkerRecord.from_json(found.value).address, found.create_revision)
    except InvalidRequest:
        return AddressTold(session, None, 0)


def _shard_of(text: str) -> int | None:
    try:
        shard = int(text, 16)
    except ValueError:
        return None
    return shard if 0 <= shard < SHARDS and f"{shard:02x}" == text else None
