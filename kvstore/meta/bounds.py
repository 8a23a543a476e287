"""The bound of a root that the processes of one host share: their limits, and the room that they claim beforehand.

Collectors bound the writers that hear them (rules S1 to S5 of gc/PROTOCOL.md). This is for the time when none is there:
the key ``level`` has a sum that the root's files do not exceed, and a node writes only what it has added to it (S6).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.meta.interface import Absent, Compare, Delete, KeyValue, LeaseId, Meta, ModifiedAt, Put
from kvstore.meta.keys import Keys, SessionId
from kvstore.parsing import parse_json

CLAIMED_SHARE = 0.95
"""Claims end at this share of the bound. From there on a collector says who may write."""
ATTEMPTS_MAX = 20
"""A claim is refused after it lost against others so many times."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The limits of a store: bytes that the root's files may take, and seconds that a chunk may stay unused.

    None: no such limit.
    """

    max_bytes: int | None = None
    ttl_s: float | None = None

    def __bool__(self) -> bool:
        """True if there is a limit."""
        return self != NO_BOUND

    def and_of(self, other: Bound) -> Bound:
        """Returns the smaller limits of both."""
        return Bound(_smaller(self.max_bytes, other.max_bytes), _smaller(self.ttl_s, other.ttl_s))

    def to_json(self) -> bytes:
        """Returns the stored form."""
        return json.dumps({"max_bytes": self.max_bytes, "ttl_s": self.ttl_s}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Bound:
        """Parses what ``to_json`` returned. Raises InvalidRequest for anything else."""
        fields = _fields(value)
        max_bytes, ttl_s = fields.get("max_bytes"), fields.get("ttl_s")
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise InvalidRequest(f"max_bytes={max_bytes!r}: expected a whole number of at least 1, or none")
        if ttl_s is not None and (type(ttl_s) not in (int, float) or not ttl_s > 0):
            raise InvalidRequest(f"ttl_s={ttl_s!r}: expected a number of seconds, or none")
        return cls(max_bytes, None if ttl_s is None else float(ttl_s))


NO_BOUND = Bound()


@dataclass(frozen=True, slots=True)
class Claim:
    """Room that a node may write into. ``made_at`` tells one level key from the next, which counts afresh."""

    size_bytes: int
    made_at: int


class Bounds:
    """The keys ``bounds/`` and ``level`` of one root. All methods raise the errors of the metadata store."""

    def __init__(self, meta: Meta, keys: Keys) -> None:
        self._meta = meta
        self._keys = keys

    def put(self, session: SessionId, lease: LeaseId, bound: Bound, timeout_s: float | None = None) -> None:
        """Says what a session's store asks for. Ends with the session. Raises LeaseGone."""
        self._meta.put(self._keys.bound_of(session), bound.to_json(), lease, timeout_s)

    def smallest(self, timeout_s: float | None = None) -> Bound:
        """Returns the smallest limits of all stores that wrote something. A record that cannot be read has none."""
        smallest = NO_BOUND
        for kv in self._meta.list(self._keys.bounds, timeout_s).items:
            try:
                smallest = smallest.and_of(Bound.from_json(kv.value))
            except InvalidRequest:
                continue
        return smallest

    def claim(
        self, size_bytes: int, max_bytes: int | None, is_empty: Callable[[], bool], timeout_s: float | None = None
    ) -> Claim | None:
        """Adds to the level; None if that would exceed ``max_bytes``, or if nobody knows the level.

        ``is_empty`` says that the root has no chunk: then the level begins at 0.
        """
        for _ in range(ATTEMPTS_MAX):
            found = self._meta.get(self._keys.level, timeout_s)
            if found is None and not is_empty():
                return None
            # Nobody begins a level while a collector's word is there: others may write what that allows, unclaimed.
            compares: tuple[Compare, ...] = (Absent(self._keys.level), Absent(self._keys.gc_room))
            before = 0
            if found is not None:
                compares, before = (ModifiedAt(self._keys.level, found.mod_revision),), _bytes_of(found)
            after = before + size_bytes
            if max_bytes is not None and after > CLAIMED_SHARE * max_bytes:
                return None
            result = self._meta.txn(compares, (Put(self._keys.level, _level(after)),), timeout_s)
            if result.succeeded:
                return Claim(size_bytes, result.revision if found is None else found.create_revision)
        return None

    def settle(self, size_bytes: int, made_at: int, timeout_s: float | None = None) -> None:
        """Takes from the level what was claimed and not written; if it is negative, adds what was written beyond.

        Does nothing to another level key than that of the claims, which knows nothing of them.
        """
        for _ in range(ATTEMPTS_MAX):
            found = self._meta.get(self._keys.level, timeout_s)
            if found is None or found.create_revision != made_at:
                return
            left = _level(max(0, _bytes_of(found) - size_bytes))
            if self._meta.txn(
                (ModifiedAt(found.key, found.mod_revision),), (Put(found.key, left),), timeout_s
            ).succeeded:
                return

    def level_bytes(self, timeout_s: float | None = None) -> int:
        """Returns the level; 0 if there is none."""
        found = self._meta.get(self._keys.level, timeout_s)
        return 0 if found is None else _bytes_of(found)

    def leave(self, level_bytes: int, timeout_s: float | None = None) -> None:
        """Puts the level of a collector that ends; adds it to the one that a node began since its word is gone."""
        for _ in range(ATTEMPTS_MAX):
            found = self._meta.get(self._keys.level, timeout_s)
            compare: Compare = Absent(self._keys.level)
            if found is not None:
                compare = ModifiedAt(self._keys.level, found.mod_revision)
            after = level_bytes + (0 if found is None else _bytes_of(found))
            if self._meta.txn((compare,), (Put(self._keys.level, _level(after)),), timeout_s).succeeded:
                return

    def forget(self, timeout_s: float | None = None) -> None:
        """Forgets the level, which lacks what was written: nobody claims until a collector has counted."""
        self._meta.delete(self._keys.level, timeout_s)

    def end_claims(self) -> Delete:
        """Returns the operation after which nobody can claim: part of the transaction of a collector's first word."""
        return Delete(self._keys.level)


def _level(size_bytes: int) -> bytes:
    return json.dumps({"bytes": size_bytes}, separators=(",", ":")).encode()


def _bytes_of(found: KeyValue) -> int:
    """Returns the level. One that cannot be read is more than any bound: a collector counts then."""
    try:
        size_bytes = _fields(found.value).get("bytes")
    except InvalidRequest:
        size_bytes = None
    return size_bytes if type(size_bytes) is int and size_bytes >= 0 else 1 << 62


def _smaller(one: Any, other: Any) -> Any:
    return min((each for each in (one, other) if each is not None), default=None)


def _fields(value: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(value)
    except ValueError as cause:
        raise InvalidRequest(f"not a record of a bound: {cause}") from cause
    if not isinstance(fields, dict):
        raise InvalidRequest("not a record of a bound: expected an object")
    return fields
