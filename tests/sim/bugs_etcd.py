"""Bugs that show when etcd comes back older than the root, loses a watch, or is another cluster's (C1 to C6, V3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from kvstore.meta.pins import PinRecord
from kvstore.meta.session import Session
from kvstore.meta.store import TxnResult
from kvstore.meta.sweeps import Seq
from kvstore.node import follower, gc_state, holds, known
from kvstore.node import follower as start_fence
from kvstore_gc import grace, ledger
from kvstore_gc.grace import Spared
from tests.sim.planting import BUGS, bug


@bug("lapsed")
def no_start_fence() -> Iterator[None]:
    """C4: a session begins without fencing the sweeps that etcd has forgotten."""
    with patch.object(start_fence.StartFence, "lift_unnamed", lambda self: None):
        yield


@bug("forked")
def no_seq_chain() -> Iterator[None]:
    """C1: a node takes every event, whatever chain it continues, and announces on any."""

    def follow(self: gc_state.View, link: Any) -> None:
        if link.kv is not None:
            self._seq = link.kv.value
            self._nonce = Seq.from_json(link.kv.value).nonce

    def txn(self: Session, compares: Any = (), operations: Any = (), **rest: Any) -> TxnResult:
        return real(self, (), operations, **rest)

    real = Session.txn
    with (
        patch.object(gc_state.View, "_follow", follow),
        patch.object(gc_state.View, "is_last", lambda self, seq: True),
        patch.object(Session, "txn", txn),
    ):
        yield


@bug("lapsed")
def no_chains() -> Iterator[None]:
    """C1 and C2: nor does a session mind that etcd has lost its last write."""
    with BUGS["no_seq_chain"](), BUGS["no_key_chain"]():
        yield


@bug("forked")
def announce_unchained() -> Iterator[None]:
    """A3: an announcement does not need the chain of sweeps to end where the view ends."""

    def txn(self: Session, compares: Any = (), operations: Any = (), **rest: Any) -> TxnResult:
        return real(self, (), operations, **rest)

    real = Session.txn
    with patch.object(Session, "txn", txn):
        yield


@bug("lapsed")
def no_key_chain() -> Iterator[None]:
    """C2: a session does not mind that etcd has lost its last write."""

    def settle(self: Session, deadline: Any) -> int:
        found = self._meta.get(self.key)
        if found is None:
            raise self._broken("its key is gone from the store")
        self._written_at = found.mod_revision
        self._unsettled.clear()
        return self._record.write

    with patch.object(Session, "_settle", settle):
        yield


@bug("forked")
def no_reread() -> Iterator[None]:
    """C3: a collector does not look whether etcd still has its sweep."""

    def ready(self: grace.Grace, sweeps: Any, items: Any) -> tuple[list[ledger.InFlight], list[bytes]]:
        sessions = self._sessions(items)
        return [one for one in sweeps if not grace._laggards(sessions, one)], [one.held for one in sessions]

    def look(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> grace.Look:
        sessions = self._sessions(self._meta.list(self._keys.sessions, self._timeout_s).items)
        late = [one for one in sweeps if grace._laggards(sessions, one)]
        return grace.Look(late, [one for one in sweeps if one not in late], [])

    with patch.object(grace.Grace, "_ready", ready), patch.object(grace.Grace, "look", look):
        yield


@bug("lapsed")
def reread_unchecked() -> Iterator[None]:
    """V3: after a lost watch nobody looks whether the session's chain still holds; births are kept too."""
    with (
        patch.object(Session, "check_chain", lambda self, timeout_s=None: None),
        patch.object(holds.Holds, "age_all", lambda self: None),
    ):
        yield


@bug("forked")
def split_read() -> Iterator[None]:
    """C3: pages of a read are not read once more. Twins and fences hide it; ``test_c3_...`` shows it."""

    def decide(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> tuple[list[ledger.InFlight], Spared, Spared]:
        items = self._meta.list(self._keys.prefix, self._refs_timeout_s).items
        pinned = [PinRecord.of(kv).packed for kv in items if kv.key.startswith(self._keys.refs)]
        ready, held = self._ready(sweeps, items)
        return ready, Spared.of([*pinned, *self._twins()]), Spared.of(held)

    with patch.object(grace.Grace, "decide", decide):
        yield


@bug("lapsed")
def lost_watch_no_key_check() -> Iterator[None]:
    """V3: after a lost watch nobody looks whether the session's chain still holds."""
    with patch.object(Session, "check_chain", lambda self, timeout_s=None: None):
        yield


@bug("forked")
def lost_watch_keeps_births() -> Iterator[None]:
    """V3: after a lost watch holds keep their births."""
    with patch.object(holds.Holds, "age_all", lambda self: None):
        yield


@bug("cut")
def lost_watch_keeps_cache() -> Iterator[None]:
    """V3: after a lost watch, remembered chunks stay remembered as present."""

    def reread(self: gc_state.View, snapshot: Any) -> None:
        with patch.object(known.Known, "clear", lambda self: None):
            real(self, snapshot)

    real = gc_state.View.reread
    with patch.object(gc_state.View, "reread", reread):
        yield


@bug("calm")
def generation_not_compared() -> Iterator[None]:
    """C6: a node protects whatever generation etcd has."""

    class Nothing:
        why = ""

    with patch.object(follower, "Foreign", Nothing):
        yield
