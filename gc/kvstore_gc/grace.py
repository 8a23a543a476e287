"""The grace of sweeps: the one read that decides that it is over, and the pins that it spares (rule G4).

Grace is over when every session in etcd has announced the sweep's stamp. The refs are part of the same read, because a
node may pin what it holds until the moment it announces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.meta.interface import KeyValue, LeaseId
from kvstore.meta.pins import PinRecord
from kvstore.meta.session import SessionRecord
from kvstore_gc.ledger import InFlight, Ledger, still_there
from kvstore_gc.listing import Marks, are_among, marks_of
from kvstore_gc.site import Site

log = logging.getLogger(__name__)

Twins = Callable[[], Sequence[bytes]]
"""Packed addresses of all pins that have a twin on the root (rule C5). Raises if one cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """The addresses that some pin protects, 8 bytes of memory each: there may be millions.

    Told apart by their marks. Another address shares one by a chance of 2 ** -64, and is then spared too.
    """

    marks: Marks

    @classmethod
    def of(cls, packed: Sequence[bytes]) -> Pinned:
        """Makes it from packed addresses of 16 bytes each."""
        return cls(marks_of(packed))

    def __contains__(self, address: bytes) -> bool:
        """True if an address must be spared."""
        return bool(are_among(marks_of([address]), self.marks)[0])


@dataclass(frozen=True, slots=True)
class Laggard:
    """A session that has not announced a stamp yet."""

    key: str
    announced: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Look:
    """The sweeps that are still in flight: those whose grace goes on, those whose grace seems over, and who delays."""

    waiting: list[InFlight]
    due: list[InFlight]
    laggards: list[Laggard]


class Grace:
    """Looks at sessions, refs and keys."""

    def __init__(self, site: Site, ledger: Ledger, twins: Twins) -> None:
        self._meta = site.meta
        self._keys = site.keys
        self._ledger = ledger
        self._twins = twins
        self._timeout_s = site.timeout_s
        self._refs_timeout_s = site.timings.refs_timeout_s

    def look(self, sweeps: Sequence[InFlight]) -> Look:
        """The state of the sweeps. A cheap look at the keys and the sessions, which decides nothing."""
        found = self._ledger.in_flight()
        sessions = self._sessions(self._meta.list(self._keys.sessions, self._timeout_s).items)
        self._ledger.sessions_count = len(sessions)
        waiting: list[InFlight] = []
        due: list[InFlight] = []
        laggards: dict[LeaseId, Laggard] = {}
        for now in still_there(sweeps, found):
            late = _laggards(sessions, now)
            (waiting if late else due).append(now)
            laggards |= {each.lease: each for each in late}
        return Look(waiting, due, list(laggards.values()))

    def decide(self, sweeps: Sequence[InFlight]) -> tuple[list[InFlight], Pinned]:
        """Returns the sweeps that may go on, and the addresses that must be spared in them.

        Raises Unavailable, RootMismatch if a ref or a twin cannot be understood: nobody knows what it protects.
        """
        items = self._meta.list(self._keys.prefix, self._refs_timeout_s).items
        pinned = [PinRecord.of(kv).packed for kv in items if kv.key.startswith(self._keys.refs)]
        ready = self._ready(sweeps, items)
        if ready:
            # The read above may have come in pages, with a restored store in between: what decides is read once more.
            again = [
                *self._meta.list(self._keys.condemned, self._timeout_s).items,
                *self._meta.list(self._keys.sessions, self._timeout_s).items,
            ]
            ready = self._ready(ready, again)
        return ready, Pinned.of([*pinned, *self._twins()])

    def pinned(self) -> Pinned:
        """The addresses that are pinned now; only ``decide`` proves anything. Raises as it does."""
        refs = self._meta.list(self._keys.refs, self._refs_timeout_s).items
        return Pinned.of([*(PinRecord.of(kv).packed for kv in refs), *self._twins()])

    def revoke(self, laggards: Sequence[Laggard]) -> None:
        """Ends sessions that have kept collectors waiting for too long (rule H4). Raises Unavailable."""
        for one in laggards:
            log.warning("session.revoked %s announced=%d", one.key, one.announced)
            self._meta.revoke(one.lease, self._timeout_s)

    def _sessions(self, items: Sequence[KeyValue]) -> list[KeyValue]:
        """The sessions among some keys. A key that no node writes, or without a lease, is nobody to wait for."""
        sessions = (kv for kv in items if kv.key.startswith(self._keys.sessions) and kv.lease)
        return [kv for kv in sessions if self._keys.parse_session(kv.key)]

    def _ready(self, sweeps: Sequence[InFlight], items: Sequence[KeyValue]) -> list[InFlight]:
        sessions = self._sessions(items)
        return [now for now in still_there(sweeps, self._ledger.parse(items)) if not _laggards(sessions, now)]


def _laggards(sessions: Sequence[KeyValue], sweep: InFlight) -> list[Laggard]:
    """The sessions that have not announced a sweep; one whose record cannot be read has announced nothing."""
    if sweep.record.is_final:
        return []  # its grace was over before its list became final
    late = []
    for kv in sessions:
        try:
            announced = SessionRecord.from_json(kv.value).announced
        except InvalidRequest:
            announced = -1
        if announced < sweep.stamp:
            late.append(Laggard(kv.key, announced, kv.lease))
    return late
