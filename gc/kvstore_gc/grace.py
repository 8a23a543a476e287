"""The grace of sweeps: the one read that decides that it is over, and what it spares (rule G4).

Grace is over when every session in etcd has announced the sweep's stamp. What a session holds of the sweep is part of
its announcement. The refs are part of the same read: a node may pin what it holds until the moment it announces.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from kvstore.errors import InvalidRequest, RootMismatch
from kvstore.meta.pins import StoredPin
from kvstore.meta.session import SessionRecord
from kvstore.meta.store import KeyValue, LeaseId
from kvstore.root.fences import list_twins, read_twin
from kvstore_gc.ledger import InFlight, SweepStore, still_there
from kvstore_gc.rank import Marks, are_among, marks_of
from kvstore_gc.site import Site

log = logging.getLogger(__name__)

HELD_S = 10.0
"""A chunk spared as held is not chosen again for this long: the end of its hold is unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Spared:
    """The addresses that no sweep may take, 8 bytes of memory each: there may be millions.

    Only their marks are compared. Another address shares one with probability 2 ** -64, and is then spared too.
    """

    marks: Marks

    @classmethod
    def of(cls, packed: Sequence[bytes]) -> Spared:
        """Makes it from packed addresses of 16 bytes each."""
        return cls(marks_of(packed))

    def __or__(self, other: Spared) -> Spared:
        return Spared(np.union1d(self.marks, other.marks))

    def __contains__(self, address: bytes) -> bool:
        """True if an address must be spared."""
        return bool(len(self.marks) and are_among(marks_of([address]), self.marks)[0])


@dataclass(frozen=True, slots=True)
class Announced:
    """A session in etcd: the revision that it has announced, and what it holds of the sweeps up to that one, packed."""

    key: str
    lease: LeaseId
    revision: int
    held: bytes

    @classmethod
    def of(cls, kv: KeyValue) -> Announced:
        """What a session's key says; one whose record cannot be read has announced nothing."""
        try:
            record = SessionRecord.from_json(kv.value)
        except InvalidRequest:
            return cls(kv.key, kv.lease, -1, b"")
        return cls(kv.key, kv.lease, record.announced, record.held)


@dataclass(frozen=True, slots=True)
class Look:
    """The sweeps that are still in flight: those whose grace goes on, those whose grace seems over, and who delays."""

    waiting: list[InFlight]
    due: list[InFlight]
    laggards: dict[tuple[LeaseId, int], Announced]
    """Sessions that have not announced one of them, by their lease and its stamp."""


class Grace:
    """Looks at sessions, refs and keys."""

    def __init__(self, site: Site, ledger: SweepStore) -> None:
        self._root = site.root
        self._meta = site.meta
        self._keys = site.keys
        self._clock = site.clock
        self._ledger = ledger
        self._twins_seen: dict[str, bytes] = {}
        self._timeout_s = site.timeout_s
        self._refs_timeout_s = site.timings.refs_timeout_s
        self._held: list[tuple[float, Spared]] = []

    def look(self, sweeps: Sequence[InFlight]) -> Look:
        """The state of the sweeps. A cheap look at the keys and the sessions, which decides nothing."""
        found = self._ledger.in_flight()
        sessions = self._sessions(self._meta.list(self._keys.sessions, self._timeout_s).items)
        self._ledger.sessions_count = len(sessions)
        waiting: list[InFlight] = []
        due: list[InFlight] = []
        laggards: dict[tuple[LeaseId, int], Announced] = {}
        for now in still_there(sweeps, found):
            late = _laggards(sessions, now)
            (waiting if late else due).append(now)
            laggards |= {(each.lease, now.stamp): each for each in late}
        return Look(waiting, due, laggards)

    def decide(self, sweeps: Sequence[InFlight]) -> tuple[list[InFlight], Spared, Spared]:
        """Returns the sweeps that may go on, and the addresses that must be spared in them: pinned ones, and held ones.

        Raises Unavailable, RootMismatch if a ref or a twin cannot be parsed: what it protects is unknown.
        """
        items = self._meta.list(self._keys.prefix, self._refs_timeout_s).items
        pinned = [StoredPin.from_bytes(kv.value, kv.key).packed for kv in items if kv.key.startswith(self._keys.refs)]
        ready, held = self._ready(sweeps, items)
        if ready:
            # The read above may have come in pages, with a restored store in between: what decides is read once more.
            again = [
                *self._meta.list(self._keys.condemned, self._timeout_s).items,
                *self._meta.list(self._keys.sessions, self._timeout_s).items,
            ]
            ready, held_again = self._ready(ready, again)
            # What the first read found held may be pinned by now, and its hold over: that pin is in neither read.
            held += held_again
        spared = Spared.of(held)
        if ready and len(spared.marks):
            self._held.append((self._clock.monotonic_s(), spared))
        return ready, Spared.of([*pinned, *self._twins()]), spared

    def pinned(self) -> Spared:
        """The addresses that are pinned now; only ``decide`` proves anything. Raises as it does."""
        refs = self._meta.list(self._keys.refs, self._refs_timeout_s).items
        return Spared.of([*(StoredPin.from_bytes(kv.value, kv.key).packed for kv in refs), *self._twins()])

    def kept(self) -> Spared:
        """The addresses that are pinned now, or were spared as held a moment ago: advice. Raises as ``pinned`` does."""
        now_s = self._clock.monotonic_s()
        self._held = [(at_s, held) for at_s, held in self._held if now_s - at_s < HELD_S]
        return reduce(or_, (held for _, held in self._held), self.pinned())

    def revoke(self, laggards: Sequence[Announced]) -> None:
        """Ends sessions that have kept collectors waiting for too long (rule H4). Raises Unavailable."""
        for one in laggards:
            log.warning("session.revoked %s announced=%d", one.key, one.revision)
            self._meta.revoke(one.lease, self._timeout_s)

    def _twins(self) -> list[bytes]:
        """Packed addresses of the pins that have a twin on the root (rule C5). It never changes: each is read once."""
        found: dict[str, bytes] = {}
        for name in list_twins(self._root):
            packed = self._twins_seen.get(name)
            if packed is None:
                content = read_twin(self._root, name)
                if content is None:
                    if name in list_twins(self._root):
                        raise RootMismatch(f"{name} cannot be read as a pin's twin: see deploy/RUNBOOK.md")
                    continue  # removed since it was listed: its pin has ended
                packed = StoredPin.from_bytes(content, name).packed
            found[name] = packed
        self._twins_seen = found
        return list(found.values())

    def _sessions(self, items: Sequence[KeyValue]) -> list[Announced]:
        """The sessions among some keys. Keys that no node writes and keys without a lease are not waited for."""
        sessions = (kv for kv in items if kv.key.startswith(self._keys.sessions) and kv.lease)
        return [Announced.of(kv) for kv in sessions if self._keys.parse_session(kv.key)]

    def _ready(self, sweeps: Sequence[InFlight], items: Sequence[KeyValue]) -> tuple[list[InFlight], list[bytes]]:
        """Returns the sweeps whose grace is over by these keys, and what the sessions among them hold."""
        sessions = self._sessions(items)
        ready = [now for now in still_there(sweeps, self._ledger.parse(items)) if not _laggards(sessions, now)]
        return ready, [one.held for one in sessions]


def _laggards(sessions: Sequence[Announced], sweep: InFlight) -> list[Announced]:
    """The sessions that have not announced a sweep."""
    if sweep.record.is_final:
        return []  # its grace was over before its list became final
    return [one for one in sessions if one.revision < sweep.stamp]
