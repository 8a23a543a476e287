"""Bugs of nodes: the rules W, V, H, A and P, and what a session owes to an etcd that may go back (C1, C2, C4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kvstore.address import Address, Chain
from kvstore.errors import Unavailable
from kvstore.format.places import Name
from kvstore.meta.interface import Meta, Snapshot, TxnResult
from kvstore.meta.keys import Keys
from kvstore.meta.session import Session
from kvstore.meta.sweeps import Seq
from kvstore.node import chunks, follower, holds, known, member, node, view
from kvstore.results import PinRecord
from kvstore.root import memory
from tests.sim.bugs import BUGS, breaks


@breaks("narrow")
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


@breaks("damaged")
def set_aside_deletes() -> Iterator[None]:
    """W3: a damaged file is deleted at its name, where a good one may have come meanwhile."""

    def set_aside(self: chunks.Chunks, expected: Any, damage: Any) -> None:
        self.known.forget(expected.address)
        self.root.remove(self._name_of(expected))

    with patch.object(chunks.Chunks, "set_aside", set_aside):
        yield


@breaks("arriving")
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


@breaks("arriving")
def rejoin_keeps_holds() -> Iterator[None]:
    """V2: holds survive their session."""
    with patch.object(holds.Holds, "drop_all", lambda self: None):
        yield


@breaks("relapsed")
def reread_unchecked() -> Iterator[None]:
    """V3: after a lost watch nobody looks whether the session's chain still holds; births are kept too."""
    with (
        patch.object(Session, "check_chain", lambda self, timeout_s=None: None),
        patch.object(holds.Holds, "age_all", lambda self: None),
    ):
        yield


@breaks("narrow")
def match_ignores_condemned() -> Iterator[None]:
    """H1: what is condemned is matched and held."""
    with patch.object(view.View, "leading", lambda self, addresses: len(addresses)):
        yield


@breaks("hasty")
def look_before_hold() -> Iterator[None]:
    """H2: first look, then hold."""

    def hold(self: node.Node, chain: Chain, ttl_s: float | None = None, deadline_s: float | None = None) -> holds.Hold:
        found = chain.leading(self.match(chain, deadline_s))
        taken = self.holds.take(found, ttl_s)
        taken.count = len(taken.chain)
        return taken

    with patch.object(node.Node, "hold", hold):
        yield


@breaks("narrow")
def cache_not_evicted() -> Iterator[None]:
    """H3: what is remembered to be present stays so when a sweep condemns it."""
    with patch.object(known.Known, "forget_shards", lambda self, shards, shard_bits: None):
        yield


@breaks("hasty")
def cache_epoch_unchecked() -> Iterator[None]:
    """H3: what was looked at before a sweep condemned is remembered after it."""

    def add(self: known.Known, address: Address, quantum: int, *, renewed: bool, epoch: int) -> None:
        real(self, address, quantum, renewed=renewed, epoch=self.epoch)

    real = known.Known.add
    with patch.object(known.Known, "add", add):
        yield


@breaks("narrow")
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


@breaks("narrow")
def announce_while_holding() -> Iterator[None]:
    """A2: a node announces although an older hold lives."""
    with patch.object(holds.Holds, "announceable", lambda self: self._view.revision):
        yield


@breaks("pinned")
def pin_without_hold() -> Iterator[None]:
    """P1: nothing is held while the pin is on its way."""

    def pin(self: member.Member, chain: Chain, ttl_s: float, owner: str) -> PinRecord:
        at = self.node
        found = chain.leading(at.present_leading(chain, len(chain)))
        if not found.addresses:
            return self._no_pin(owner, chain)
        tokens = len(found) * chain.namespace.layout.chunk_tokens
        ref = self._pins.pin(owner, found.addresses, round(ttl_s), tokens, chain.namespace.digest)
        return PinRecord(member._pin_id(ref), owner, chain.namespace.name, tokens, at.clock.now_s() + ttl_s)

    with patch.object(member.Member, "pin", pin):
        yield


@breaks("relapsed")
def no_start_fence() -> Iterator[None]:
    """C4: a session begins without fencing the sweeps that etcd has forgotten."""
    with patch.object(follower.Follower, "_fence_unnamed", lambda self: 0):
        yield


@breaks("forked")
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


@breaks("relapsed")
def no_chains() -> Iterator[None]:
    """C1 and C2: nor does a session mind that etcd has lost its last write."""

    def settle(self: Session, deadline: Any) -> int:
        found = self._meta.get(self.key)
        if found is None:
            raise self._broken("its key is gone from the store")
        self._written_at = found.mod_revision
        self._unsettled.clear()
        return self._record.write

    with BUGS["no_seq_chain"].plant(), patch.object(Session, "_settle", settle):
        yield
