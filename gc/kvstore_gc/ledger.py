"""The sweeps in flight as etcd has them: condemning and closing them, in transactions on one chain.

Every step here is one transaction or one read. A lost reply is settled by reading back. A late transaction finds
its compares broken, or names a sweep that any collector can finish (rules G2, G6, C1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import RootMismatch, Unavailable
from kvstore.meta.keys import SweepId
from kvstore.meta.store import Absent, Compare, Delete, KeyValue, ModifiedAt, Put, ValueIs
from kvstore.meta.sweeps import NO_NONCE, Condemned, Seq
from kvstore_gc.site import Site

ANNOUNCEMENTS_PER_S = 200
"""The rate that all nodes together are asked not to exceed, while there is always a sweep to announce."""
TRIES_MAX = 20
"""Other collectors on the chain make a transaction fail. After this many failures the round tries again."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A sweep as its key says. ``stamp`` is the revision at which it condemned."""

    part: int
    stamp: int
    revision: int
    record: Condemned

    @property
    def sweep(self) -> SweepId:
        """The id of the sweep."""
        return self.record.sweep


def still_there(sweeps: Sequence[InFlight], found: Mapping[int, InFlight]) -> list[InFlight]:
    """The sweeps that are still in flight, as they were ``found`` by part."""
    pairs = ((found.get(one.part), one) for one in sweeps)
    return [now for now, one in pairs if now is not None and (now.sweep, now.stamp) == (one.sweep, one.stamp)]


class SweepStore:
    """The condemned keys of one root, as one collector writes them."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._meta = site.meta
        self._keys = site.keys
        self._timeout_s = site.timeout_s
        self.sessions_count = 0
        """The number of live sessions, as last seen; nodes are asked for a pace that suits it."""

    def in_flight(self) -> dict[int, InFlight]:
        """All sweeps in flight, by part. Raises Unavailable, RootMismatch if one cannot be understood."""
        return self.parse(self._meta.list(self._keys.condemned, self._timeout_s).items)

    def parse(self, items: Sequence[KeyValue]) -> dict[int, InFlight]:
        """The sweeps in flight among the given keys. Raises RootMismatch if one cannot be understood."""
        found = {}
        for kv in items:
            part = self._keys.parse_condemned(kv.key)
            if part is not None:
                try:
                    record = Condemned.from_bytes(kv.value)
                except RootMismatch as error:
                    raise RootMismatch(f"{kv.key}: {error}; kvstore fsck --adopt puts it right") from error
                found[part] = InFlight(part, kv.create_revision, kv.mod_revision, record)
        return found

    def condemn(self, records: Mapping[int, Condemned]) -> list[InFlight]:
        """Rule G2: begins sweeps of parts that have none; returns those that began.

        Another collector was faster with the others. Raises Unavailable if the outcome stays unknown: what may still
        land is adopted later.
        """
        wanted = dict(records)
        for _ in range(TRIES_MAX):
            link, compare = self._next_link()
            free = [Absent(self._keys.condemned_in(part)) for part in wanted]
            puts = [Put(self._keys.condemned_in(part), record.to_bytes()) for part, record in wanted.items()]
            unknown = False
            try:
                result = self._meta.txn((*free, compare), (*puts, link), self._timeout_s)
                if result.succeeded:
                    return [InFlight(part, result.revision, result.revision, each) for part, each in wanted.items()]
            except Unavailable:
                unknown = True  # it may have landed, or land later: a key with our sweep is ours
            found = self.in_flight()
            ours = [one for part, one in found.items() if part in records and one.sweep == records[part].sweep]
            if ours or unknown:
                # Never again under these ids: others may already have finished what has landed (rule G1).
                return ours
            wanted = {part: record for part, record in wanted.items() if part not in found}
            if not wanted:
                return []
        raise _crowded(f"{len(records)} parts could not be condemned")

    def settle(self, sweep: InFlight, final: Condemned) -> InFlight | None:
        """Rule O1: fixes the list that every run deletes from. Returns the sweep as it is then.

        Another run may have fixed the list. None if the sweep is no longer in flight. Raises Unavailable.
        """
        assert final.is_final and final.sweep == sweep.sweep
        key = self._keys.condemned_in(sweep.part)
        for _ in range(TRIES_MAX):
            link, compare = self._next_link()
            same = ModifiedAt(key, sweep.revision)
            try:
                self._meta.txn((same, compare), (Put(key, final.to_bytes()), link), self._timeout_s)
            except Unavailable:
                pass
            now = still_there([sweep], self.in_flight())
            if not now:
                return None
            if now[0].record.is_final:
                return now[0]
        raise _crowded("a sweep's final list could not be fixed")

    def close(self, sweeps: Sequence[InFlight]) -> None:
        """Rule G6: ends sweeps whose fence has been lifted, as far as they are still those. Raises Unavailable."""
        self._end(sweeps, lambda now: True)

    def abandon(self, sweeps: Sequence[InFlight]) -> None:
        """Rule G8: ends sweeps that have taken nothing, except those whose list another run has made final (rule O1).

        Raises Unavailable.
        """
        self._end(sweeps, lambda now: not now.record.is_final)

    def _end(self, sweeps: Sequence[InFlight], may_end: Callable[[InFlight], bool]) -> None:
        if not sweeps:
            return
        for _ in range(TRIES_MAX):
            left = [now for now in still_there(sweeps, self.in_flight()) if may_end(now)]
            if not left:
                return
            link, compare = self._next_link()
            # As it was read just now: a list that becomes final in between fails this.
            same = [ModifiedAt(self._keys.condemned_in(one.part), one.revision) for one in left]
            deletes = [Delete(self._keys.condemned_in(one.part)) for one in left]
            try:
                if self._meta.txn((*same, compare), (*deletes, link), self._timeout_s).succeeded:
                    return
            except Unavailable:
                continue
        raise _crowded(f"{len(sweeps)} sweeps could not be closed")

    def _next_link(self) -> tuple[Put, Compare]:
        """The next link of the chain, and the compare that makes sure that it is the next one."""
        found = self._meta.get(self._keys.gc_seq, self._timeout_s)
        nonce, pace_s = self._site.ids.fresh(), round(self.sessions_count / ANNOUNCEMENTS_PER_S, 1)
        if found is None:
            return Put(self._keys.gc_seq, Seq(nonce, NO_NONCE, pace_s).to_json()), Absent(self._keys.gc_seq)
        try:
            before = Seq.from_json(found.value)
        except RootMismatch as error:
            raise RootMismatch(f"{found.key} cannot be read ({error}): run kvstore fsck --adopt") from error
        link = Put(self._keys.gc_seq, Seq(nonce, before.nonce, pace_s).to_json())
        return link, ValueIs(self._keys.gc_seq, found.value)


def _crowded(what: str) -> Unavailable:
    return Unavailable(
        f"{what}: other collectors write to the chain of sweeps all the time; the next round tries again"
    )
