"""Bugs of sweeps: condemning, grace, closing, abandoning (G1 to G8), and the final list of object stores (O1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvstore.meta.store import Compare, Delete, KeyValue, Meta, Put, TxnResult
from kvstore.meta.sweeps import Condemned
from kvstore_gc import deletion, execute, grace, ledger
from kvstore_gc.grace import Spared
from tests.sim.planting import bug


class _Trimmed:
    """Metadata whose transactions make fewer compares."""

    def __init__(self, meta: Meta, keep: Callable[[Sequence[Compare]], Sequence[Compare]]) -> None:
        self._meta = meta
        self._keep = keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meta, name)

    def txn(self, compares: Sequence[Compare], operations: Sequence[Any], timeout_s: float | None = None) -> TxnResult:
        return self._meta.txn(self._keep(compares), operations, timeout_s)


def _first_of_several(self: ledger.Ledger) -> ledger.Ledger:
    """A ledger that compares one shard's key and the chain."""
    meta: Any = _Trimmed(self._meta, lambda compares: (compares[0], compares[-1]))
    return ledger.Ledger(replace(self._site, meta=meta))


@bug("paired")
def condemn_blind() -> Iterator[None]:
    """G2: a sweep is condemned over another one in the same shard."""

    def condemn(self: ledger.Ledger, records: Mapping[int, Condemned], *when: Any) -> list[ledger.InFlight]:
        link, compare = self._next_link()
        puts = [Put(self._keys.condemned_in(shard), record.to_bytes()) for shard, record in records.items()]
        self._meta.txn((compare,), (*puts, link), self._timeout_s)
        found = self.in_flight()
        return [one for shard, one in found.items() if shard in records and one.sweep == records[shard].sweep]

    with patch.object(ledger.Ledger, "condemn", condemn):
        yield


@bug("narrow")
def no_grace() -> Iterator[None]:
    """G4: nobody is waited for."""
    with patch.object(grace, "_laggards", lambda sessions, sweep: []):
        yield


@bug("pinned")
def refs_before_grace() -> Iterator[None]:
    """G4: the refs were read before the grace was over."""

    def look(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> grace.Look:
        early = getattr(self, "early", None) or self.pinned()
        found = real_look(self, sweeps)
        self.early = early if found.waiting else None  # type: ignore[attr-defined]
        self.pinned_early = early  # type: ignore[attr-defined]
        return found

    def decide(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> tuple[list[ledger.InFlight], Spared, Spared]:
        ready, _, held = real_decide(self, sweeps)
        return ready, self.pinned_early, held  # type: ignore[attr-defined]

    real_look, real_decide = grace.Grace.look, grace.Grace.decide
    with patch.object(grace.Grace, "look", look), patch.object(grace.Grace, "decide", decide):
        yield


@bug("narrow")
def held_not_spared() -> Iterator[None]:
    """A2, G4: a collector takes what a session said that it holds."""

    def ready(self: grace.Grace, sweeps: Any, items: Any) -> tuple[list[ledger.InFlight], list[bytes]]:
        return real(self, sweeps, items)[0], []

    real = grace.Grace._ready
    with patch.object(grace.Grace, "_ready", ready):
        yield


@bug("paired")
def condemn_compares_first() -> Iterator[None]:
    """G2: one transaction for several shards compares only the first one's key."""
    real = ledger.Ledger.condemn
    with patch.object(ledger.Ledger, "condemn", lambda self, *how: real(_first_of_several(self), *how)):
        yield


@bug("joining")
def grace_stale_read() -> Iterator[None]:
    """G4: only the sessions that there were before the sweep was condemned are waited for."""

    def condemn(self: ledger.Ledger, records: Mapping[int, Condemned], *when: Any) -> list[ledger.InFlight]:
        self.early = {kv.key for kv in self._meta.list(self._keys.sessions).items}  # type: ignore[attr-defined]
        return real_condemn(self, records, *when)

    def sessions(self: grace.Grace, items: Sequence[KeyValue]) -> list[grace.Announced]:
        early = getattr(self._ledger, "early", None)
        return [one for one in real_sessions(self, items) if early is None or one.key in early]

    real_condemn, real_sessions = ledger.Ledger.condemn, grace.Grace._sessions
    with patch.object(ledger.Ledger, "condemn", condemn), patch.object(grace.Grace, "_sessions", sessions):
        yield


@bug("pinned")
def refs_before_condemn() -> Iterator[None]:
    """G4: the refs were read before the sweep was condemned."""

    def sweep(self: execute.Sweeper, plans: Any) -> execute.SweepReport:
        self._grace.early = self._grace.pinned()  # type: ignore[attr-defined]
        try:
            return real_sweep(self, plans)
        finally:
            del self._grace.early  # type: ignore[attr-defined]

    def decide(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> tuple[list[ledger.InFlight], Spared, Spared]:
        ready, pinned, held = real_decide(self, sweeps)
        return ready, getattr(self, "early", pinned), held

    real_sweep, real_decide = execute.Sweeper.sweep, grace.Grace.decide
    with patch.object(execute.Sweeper, "sweep", sweep), patch.object(grace.Grace, "decide", decide):
        yield


@bug("narrow")
def unreadable_session_skipped() -> Iterator[None]:
    """G4: a session whose record cannot be read is not waited for."""

    def laggards(sessions: Sequence[grace.Announced], sweep: ledger.InFlight) -> list[grace.Announced]:
        return [one for one in real(sessions, sweep) if one.revision >= 0]

    real = grace._laggards
    with patch.object(grace, "_laggards", laggards):
        yield


@bug("deposed")
def close_blind() -> Iterator[None]:
    """G6: closing a sweep deletes whatever key its shard has."""

    def close(self: ledger.Ledger, sweeps: Sequence[ledger.InFlight]) -> None:
        link, compare = self._next_link()
        deletes = [Delete(self._keys.condemned_in(one.shard)) for one in sweeps]
        if not self._meta.txn((compare,), (*deletes, link), self._timeout_s).succeeded:
            close(self, sweeps)

    with patch.object(ledger.Ledger, "close", close):
        yield


@bug("paired")
def close_compares_first() -> Iterator[None]:
    """G6: one transaction that closes several sweeps compares only the first one's key."""
    real = ledger.Ledger._end
    with patch.object(
        ledger.Ledger, "_end", lambda self, sweeps, may_end: real(_first_of_several(self), sweeps, may_end)
    ):
        yield


@bug("narrow")
def no_adopt() -> Iterator[None]:
    """G7: nobody adopts the sweeps of a dead collector."""
    with patch.object(execute.Sweeper, "adopt", lambda self, shards=None: execute.SweepReport()):
        yield


@bug("deposed")
def abandon_keeps_fence() -> Iterator[None]:
    """G8: a sweep is abandoned although another run may continue to take."""

    def abandon(self: execute.Sweeper, sweeps: Sequence[ledger.InFlight], report: execute.SweepReport) -> None:
        self._ledger.abandon(sweeps)
        report.sweeps["abandoned"] += self._remove_plans(sweeps)

    with patch.object(execute.Sweeper, "_abandon", abandon):
        yield


@bug("objects")
def abandon_final() -> Iterator[None]:
    """G8: without a fence a sweep is abandoned although its list is final."""
    with patch.object(ledger.Ledger, "abandon", lambda self, sweeps: self._end(sweeps, lambda now: True)):
        yield


@bug("objects")
def own_list() -> Iterator[None]:
    """O1: each run deletes from its own list, and closes the sweep when all of that is gone."""

    def reap(self: deletion.Deleting, sweep: Any, victims: Any, pinned: Any, taken: Any) -> bool:
        mine = [one for one in victims or () if one.address not in pinned]
        self._site.each(len(mine), lambda index: self._delete(mine[index], taken))
        return self._are_gone(mine)

    with patch.object(deletion.Deleting, "reap", reap):
        yield


@bug("objects")
def blind_delete() -> Iterator[None]:
    """O1: a chunk is deleted whatever version of it is there."""

    def delete(self: deletion.Deleting, victim: Any, taken: Any) -> None:
        if self._root.remove(victim.name(self._shard_bits)):
            taken.reap(victim)

    with patch.object(deletion.Deleting, "_delete", delete):
        yield
