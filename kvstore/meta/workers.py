"""The registry of workers that serve a root, and their addresses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvstore.errors import InvalidRequest
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.session import Session
from kvstore.parsing import parse_json

RECORD_BYTES_MAX = 4096


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
        """Returns the stored form. Raises InvalidRequest over 4096 bytes."""
        value = json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()
        if len(value) > RECORD_BYTES_MAX:
            raise InvalidRequest(f"worker record has {len(value)} bytes, over the limit of {RECORD_BYTES_MAX}")
        return value

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


class Workers:
    """The workers of one root."""

    def __init__(self, meta: Meta, keys: Keys) -> None:
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
