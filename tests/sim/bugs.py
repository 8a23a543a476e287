"""Bugs to plant: each drops one rule of gc/PROTOCOL.md from the real code, and the simulation must find it.

A simulation that finds nothing may simply not look; these say where it looks.  Each is a context in which the code is
broken, named after the mutation of the model that drops the same rule where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from kvstore.address import Address, Chain
from kvstore.errors import Unavailable
from kvstore.format.places import Name
from kvstore.meta.interface import Delete, Meta, Put, Snapshot, TxnResult
from kvstore.meta.keys import Keys
from kvstore.meta.session import Session
from kvstore.meta.sweeps import Condemned, Seq
from kvstore.node import chunks, follower, holds, known, member, node, view
from kvstore.results import PinRecord
from kvstore.root import memory
from kvstore_gc import execute, grace, ledger, objects, trash

Bug = Callable[[], AbstractContextManager[object]]

BUGS: dict[str, Bug] = {}


def _bug(make: Callable[[], Iterator[None]]) -> Bug:
    """Registers a bug under its name; its first line says which rule it drops."""
    planted = contextmanager(make)
    BUGS[make.__name__] = planted
    return planted


# Nodes.


@_bug
def publish_replaces() -> Iterator[None]:
    """W1: publishing renames over what is there."""

    def publish(self: memory.MemoryRoot, staged: Name, name: Name, *, durable: bool) -> bool:
        if not name.startswith("chunks/"):
            return real(self, staged, name, durable=durable)
        with self.files.lock:
            file = self.files.find(staged)
            if file is None:
                raise Unavailable("the staged file is gone")
            self.files.write(name, file)
            self.files.delete(staged)
        return True

    real = memory.MemoryRoot.publish
    with patch.object(memory.MemoryRoot, "publish", publish):
        yield


@_bug
def set_aside_deletes() -> Iterator[None]:
    """W3: a damaged file is deleted at its name, where a good one may have come meanwhile."""

    def set_aside(self: chunks.Chunks, expected: Any, damage: Any) -> None:
        self.known.forget(expected.address)
        self.root.remove(self._name_of(expected))

    with patch.object(chunks.Chunks, "set_aside", set_aside):
        yield


@_bug
def view_before_session() -> Iterator[None]:
    """V1: gc/ is read before the session's key is put."""

    def opened(meta: Meta, keys: Keys, **rest: Any) -> Session:
        early = meta.list(keys.gc)
        session = real_open(meta, keys, **rest)
        session.early = early  # type: ignore[attr-defined]
        return session

    def begin(self: follower.Follower, session: Session) -> None:
        real_list = self._meta.list

        def listed(prefix: str, timeout_s: float | None = None) -> Snapshot:
            return session.early if prefix == self._keys.gc else real_list(prefix, timeout_s)  # type: ignore[attr-defined]

        with patch.object(self._meta, "list", listed):
            real_begin(self, session)

    real_open, real_begin = Session.open, follower.Follower.begin
    with patch.object(Session, "open", opened), patch.object(follower.Follower, "begin", begin):
        yield


@_bug
def rejoin_keeps_holds() -> Iterator[None]:
    """V2: holds survive their session."""
    with (
        patch.object(holds.Holds, "drop_all", lambda self: None),
        patch.object(holds.Holds, "drop_protecting", lambda self: None),
    ):
        yield


@_bug
def reread_unchecked() -> Iterator[None]:
    """V3: after a lost watch nobody looks whether the session's chain still holds; births are kept too."""
    with (
        patch.object(Session, "check_chain", lambda self, timeout_s=None: None),
        patch.object(holds.Holds, "age_all", lambda self: None),
    ):
        yield


@_bug
def match_ignores_condemned() -> Iterator[None]:
    """H1: what is condemned is matched and held."""
    with patch.object(view.View, "leading", lambda self, addresses: len(addresses)):
        yield


@_bug
def look_before_hold() -> Iterator[None]:
    """H2: first look, then hold."""

    def hold(self: node.Node, chain: Chain, ttl_s: float | None = None, deadline_s: float | None = None) -> holds.Hold:
        found = chain.leading(self.match(chain, deadline_s))
        taken = self.holds.take(found, ttl_s)
        taken.count = len(taken.chain)
        return taken

    with patch.object(node.Node, "hold", hold):
        yield


@_bug
def cache_not_evicted() -> Iterator[None]:
    """H3: what is remembered to be present stays so when a sweep condemns it."""
    with patch.object(known.Known, "forget_shards", lambda self, shards, shard_bits: None):
        yield


@_bug
def cache_epoch_unchecked() -> Iterator[None]:
    """H3: what was looked at before a sweep condemned is remembered after it."""

    def add(self: known.Known, address: Address, quantum: int, *, renewed: bool, epoch: int) -> None:
        real_add(self, address, quantum, renewed=renewed, epoch=self.epoch)

    def add_all(self: known.Known, addresses: list[Address], quantum: int, *, renewed: bool, epoch: int) -> None:
        real_add_all(self, addresses, quantum, renewed=renewed, epoch=self.epoch)

    real_add, real_add_all = known.Known.add, known.Known.add_all
    with patch.object(known.Known, "add", add), patch.object(known.Known, "add_all", add_all):
        yield


@_bug
def announce_unseen() -> Iterator[None]:
    """A1: a node announces etcd's newest revision, which its view has not reached."""

    def announceable(self: holds.Holds) -> int:
        return self._view.newest if not self._live else real(self)  # type: ignore[attr-defined]

    def announce(self: follower.Follower, following: Any) -> None:
        found = self._meta.list(self._keys.gc)
        self._view.newest = found.revision  # type: ignore[attr-defined]
        following.session.txn((), announced=self._holds.announceable())

    real = holds.Holds.announceable
    with (
        patch.object(holds.Holds, "announceable", announceable),
        patch.object(follower.Follower, "_announce", announce),
    ):
        yield


@_bug
def announce_while_holding() -> Iterator[None]:
    """A2: a node announces although an older hold lives."""
    with patch.object(holds.Holds, "announceable", lambda self: self._view.revision):
        yield


@_bug
def pin_without_hold() -> Iterator[None]:
    """P1: nothing is held while the pin is on its way."""

    def pin(self: member.Member, chain: Chain, ttl_s: float, owner: str) -> PinRecord:
        at = self.node
        found = chain.leading(at.puts.present_leading(chain, len(chain)))
        if not found.addresses:
            return self._no_pin(owner, chain)
        tokens = len(found) * chain.namespace.layout.chunk_tokens
        ref = self._pins.pin(owner, found.addresses, round(ttl_s), tokens, chain.namespace.digest)
        return PinRecord(member._pin_id(ref), owner, chain.namespace.name, tokens, at.clock.now_s() + ttl_s)

    with patch.object(member.Member, "pin", pin):
        yield


# Collectors.


@_bug
def condemn_blind() -> Iterator[None]:
    """G2: a sweep is condemned over another one in the same shard."""

    def condemn(self: ledger.Ledger, records: Mapping[int, Condemned]) -> list[ledger.InFlight]:
        link, compare = self._next_link()
        puts = [Put(self._keys.condemned_in(shard), record.to_bytes()) for shard, record in records.items()]
        self._meta.txn((compare,), (*puts, link), self._timeout_s)
        found = self.in_flight()
        return [one for shard, one in found.items() if shard in records and one.sweep == records[shard].sweep]

    with patch.object(ledger.Ledger, "condemn", condemn):
        yield


@_bug
def no_grace() -> Iterator[None]:
    """G4: nobody is waited for."""
    with patch.object(grace, "_laggards", lambda sessions, sweep: []):
        yield


@_bug
def refs_before_grace() -> Iterator[None]:
    """G4: the refs were read before the grace was over."""

    def look(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> grace.Look:
        early = getattr(self, "early", None) or self.pinned()
        found = real_look(self, sweeps)
        self.early = early if found.waiting else None  # type: ignore[attr-defined]
        self.pinned_early = early  # type: ignore[attr-defined]
        return found

    def decide(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> tuple[list[ledger.InFlight], grace.Pinned]:
        ready, _ = real_decide(self, sweeps)
        return ready, self.pinned_early  # type: ignore[attr-defined]

    real_look, real_decide = grace.Grace.look, grace.Grace.decide
    with patch.object(grace.Grace, "look", look), patch.object(grace.Grace, "decide", decide):
        yield


@_bug
def no_reread() -> Iterator[None]:
    """C3: a collector does not look whether etcd still has its sweep."""

    def ready(self: grace.Grace, sweeps: Sequence[ledger.InFlight], items: Any) -> list[ledger.InFlight]:
        sessions = [kv for kv in items if kv.key.startswith(self._keys.sessions)]
        return [one for one in sweeps if not grace._laggards(sessions, one)]

    def look(self: grace.Grace, sweeps: Sequence[ledger.InFlight]) -> grace.Look:
        sessions = self._meta.list(self._keys.sessions, self._timeout_s).items
        late = [one for one in sweeps if grace._laggards(sessions, one)]
        return grace.Look(late, [one for one in sweeps if one not in late], [])

    with patch.object(grace.Grace, "_ready", ready), patch.object(grace.Grace, "look", look):
        yield


@_bug
def no_twins() -> Iterator[None]:
    """C5: pins that a restored etcd has lost are not spared."""
    with patch.object(execute.Sweeper, "_twins", lambda self: []):
        yield


@_bug
def no_incarnation_check() -> Iterator[None]:
    """G5: whatever lies in the trash is deleted."""

    def settle(self: trash.Trash, entry: Name, victim: Any, taken: Any) -> None:
        self._root.remove(entry)

    with patch.object(trash.Trash, "_settle", settle):
        yield


@_bug
def fixed_trash_name() -> Iterator[None]:
    """G5: every run gives a chunk the same name in the trash."""

    class SameIds:
        def fresh(self) -> bytes:
            return bytes(16)

    def made(self: trash.Trash, *rest: Any) -> None:
        real(self, *rest)
        self._ids = SameIds()

    real = trash.Trash.__init__
    with patch.object(trash.Trash, "__init__", made):
        yield


@_bug
def close_before_fence() -> Iterator[None]:
    """G6: the sweep's key is deleted first, and its folder afterwards."""

    def close(self: execute.Sweeper, sweeps: Sequence[ledger.InFlight], report: Any) -> None:
        real_close(self, sweeps, report)
        for sweep in sweeps:
            args = self.later.pop(sweep.sweep, None)  # type: ignore[attr-defined]
            if args is not None:
                real_fence(self._trash, sweep, *args)

    def later_fence(self: trash.Trash, sweep: ledger.InFlight, *args: Any) -> bool:
        self.later[sweep.sweep] = args  # type: ignore[attr-defined]
        return True

    def made(self: execute.Sweeper, *rest: Any, **named: Any) -> None:
        real_made(self, *rest, **named)
        self.later = self._trash.later = {}  # type: ignore[attr-defined]

    real_close, real_fence, real_made = execute.Sweeper._close, trash.Trash._fence, execute.Sweeper.__init__
    with (
        patch.object(execute.Sweeper, "_close", close),
        patch.object(trash.Trash, "_fence", later_fence),
        patch.object(execute.Sweeper, "__init__", made),
    ):
        yield


@_bug
def close_blind() -> Iterator[None]:
    """G6: closing a sweep deletes whatever key its shard has."""

    def close(self: ledger.Ledger, sweeps: Sequence[ledger.InFlight]) -> None:
        link, compare = self._next_link()
        deletes = [Delete(self._keys.condemned_in(one.shard)) for one in sweeps]
        if not self._meta.txn((compare,), (*deletes, link), self._timeout_s).succeeded:
            close(self, sweeps)

    with patch.object(ledger.Ledger, "close", close):
        yield


@_bug
def no_fence() -> Iterator[None]:
    """F1: taking a chunk makes the sweep's folder where it is gone."""

    def move(self: memory.MemoryRoot, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        return real(self, source, name, make_folder=True)

    real = memory.MemoryRoot.move
    with patch.object(memory.MemoryRoot, "move", move):
        yield


@_bug
def late_mkdir() -> Iterator[None]:
    """F2: whoever takes up a sweep makes its folder once more."""

    def take(self: trash.Trash, sweep: ledger.InFlight, *rest: Any) -> None:
        self.open(sweep.sweep)
        real(self, sweep, *rest)

    real = trash.Trash._take
    with patch.object(trash.Trash, "_take", take):
        yield


# A restored etcd.


@_bug
def no_start_fence() -> Iterator[None]:
    """C4: a session begins without fencing the sweeps that etcd has forgotten."""
    with patch.object(follower.Follower, "_fence_unnamed", lambda self: 0):
        yield


@_bug
def no_seq_chain() -> Iterator[None]:
    """C1: a node takes every event, whatever chain it continues, and announces on any."""

    def follow(self: view.View, link: Any) -> None:
        if link.kv is not None:
            self._seq = link.kv.value
            self._nonce = Seq.from_json(link.kv.value).nonce

    def txn(self: Session, compares: Any = (), operations: Any = (), **rest: Any) -> TxnResult:
        return real(self, (), operations, **rest)

    real = Session.txn
    with (
        patch.object(view.View, "_follow", follow),
        patch.object(view.View, "is_last", lambda self, seq: True),
        patch.object(Session, "txn", txn),
    ):
        yield


@_bug
def no_chains() -> Iterator[None]:
    """C1 and C2: nor does a session mind that etcd has lost its last write."""

    def settle(self: Session, deadline: Any) -> int:
        found = self._meta.get(self.key)
        if found is None:
            raise self._broken("its key is gone from the store")
        self._written_at = found.mod_revision
        self._unsettled.clear()
        return self._record.write

    with BUGS["no_seq_chain"](), patch.object(Session, "_settle", settle):
        yield


# Object stores.


@_bug
def blind_delete() -> Iterator[None]:
    """O: a chunk is deleted whatever version of it is there."""

    def delete(self: objects.Deleting, victim: Any, taken: Any) -> None:
        if self._root.remove(victim.name(self._shard_bits)):
            taken.reap(victim)

    with patch.object(objects.Deleting, "_delete", delete):
        yield


@contextmanager
def planted(*names: str) -> Iterator[None]:
    """Several bugs at once."""
    with ExitStack() as undo:
        for name in names:
            undo.enter_context(BUGS[name]())
        yield
