"""Bugs of nodes: publishing, sessions and their views, holds, remembered chunks, announcements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kvstore.address import Address
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.header import Damage
from kvstore.format.places import Name
from kvstore.keyset import ChunkKeys
from kvstore.meta.keys import Keys
from kvstore.meta.session import Session
from kvstore.meta.store import Event, Meta, Snapshot
from kvstore.node import chunk_store, follower, gc_state, holds, known, node
from kvstore.root import memory
from kvstore.root.inspect import Broken, Inspector
from tests.sim.planting import bug


@bug("narrow")
def publish_replaces() -> Iterator[None]:
    """W1: publishing replaces an existing file."""

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


@bug("damaged")
def set_aside_deletes() -> Iterator[None]:
    """W3: a damaged file is deleted at its name, where a good one may have been put meanwhile."""

    def set_aside(self: chunk_store.ChunkStore, expected: Any, damage: Any) -> None:
        self.known.forget(expected.address)
        self.root.remove(self._name_of(expected))

    with patch.object(chunk_store.ChunkStore, "set_aside", set_aside):
        yield


@bug("joining")
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


@bug("arriving")
def rejoin_keeps_holds() -> Iterator[None]:
    """V2: holds survive their session."""
    with (
        patch.object(holds.Holds, "drop_all", lambda self: None),
        patch.object(holds.Holds, "drop_protecting", lambda self: None),
    ):
        yield


@bug("narrow")
def match_ignores_condemned() -> Iterator[None]:
    """H1: condemned chunks are matched and held."""
    with patch.object(gc_state.View, "leading", lambda self, addresses: len(addresses)):
        yield


@bug("hasty")
def look_before_hold() -> Iterator[None]:
    """H2: first look, then hold."""

    def hold(
        self: node.Node, chain: ChunkKeys, ttl_s: float | None = None, deadline_s: float | None = None, **_: Any
    ) -> holds.Hold:
        found = chain.leading(self.match(chain, deadline_s))
        taken = self.holds.take(found, ttl_s)
        taken.count = len(taken.chain)
        return taken

    with patch.object(node.Node, "hold", hold):
        yield


@bug("narrow")
def cache_not_evicted() -> Iterator[None]:
    """H3: chunks remembered as present stay so when a sweep condemns them."""
    with patch.object(known.Known, "forget_shards", lambda self, shards, shard_bits: None):
        yield


@bug("hasty")
def cache_epoch_unchecked() -> Iterator[None]:
    """H3: a look from before a sweep condemned is remembered after it."""

    def add(self: known.Known, address: Address, quantum: int, *, renewed: bool, epoch: int) -> None:
        real_add(self, address, quantum, renewed=renewed, epoch=self.epoch)

    def add_all(self: known.Known, addresses: list[Address], quantum: int, *, renewed: bool, epoch: int) -> None:
        real_add_all(self, addresses, quantum, renewed=renewed, epoch=self.epoch)

    real_add, real_add_all = known.Known.add, known.Known.add_all
    with patch.object(known.Known, "add", add), patch.object(known.Known, "add_all", add_all):
        yield


@bug("narrow")
def announce_unseen() -> Iterator[None]:
    """A1: a node announces etcd's newest revision, which its view has not reached."""

    def announcement(self: holds.Holds, view: Any) -> holds.Announcement:
        return real(self, view) if self._live else _unnamed(view.newest)

    def announce(self: follower.Follower, following: Any) -> None:
        found = self._meta.list(self._keys.gc)
        self._view.newest = found.revision  # type: ignore[attr-defined]
        due = self._holds.announcement(self._view)
        following.session.txn((), announced=due.revision, held=due.held)

    real = holds.Holds.announcement
    with (
        patch.object(holds.Holds, "announcement", announcement),
        patch.object(follower.Follower, "_announce", announce),
    ):
        yield


@bug("narrow")
def announce_while_holding() -> Iterator[None]:
    """A2: a node announces although an older hold lives, and does not say what that holds."""
    with patch.object(holds.Holds, "announcement", lambda self: _unnamed(self._view.revision)):
        yield


@bug("narrow")
def pin_drops_held() -> Iterator[None]:
    """P2: the write of a pin drops what the session said that it holds."""

    def write(self: Session, compares: Any, operations: Any, announcement: Any, deadline: Any) -> Any:
        return real(self, compares, operations, announcement or (self._record.announced, b""), deadline)

    real = Session._write
    with patch.object(Session, "_write", write):
        yield


@bug("damaged")
def aside_overwrites() -> Iterator[None]:
    """W3: a whole file goes back over the newer one that has its name."""

    def set_aside(self: chunk_store.ChunkStore, expected: Any, damage: Any) -> None:
        self.known.forget(expected.address)
        name, aside = self._name_of(expected), self._name_aside(expected.address)
        try:
            if self.root.move(name, aside) and self._is_intact(aside, expected):
                self.root.move(aside, name)
        except KVStoreError:
            pass

    with patch.object(chunk_store.ChunkStore, "set_aside", set_aside):
        yield


@bug("damaged")
def aside_emptied_unlooked() -> Iterator[None]:
    """W3: collectors empty the quarantine without looking for whole files."""
    with patch.object(Inspector, "look", lambda self, name: Broken(Damage.MAGIC)):
        yield


@bug("arriving")
def session_outlives_ttl() -> Iterator[None]:
    """V2: a session lives until the store says otherwise, however long ago it last answered."""
    with patch.object(Session, "alive", property(lambda self: self._lost is None)):
        yield


@bug("arriving")
def hold_outlives_session() -> Iterator[None]:
    """V2: a hold counts as alive from the end of its session's ttl until the node is told."""

    def check(self: holds.Holds, hold: holds.Hold) -> None:
        with patch.object(gc_state.View, "protects", True):
            real(self, hold)

    real = holds.Holds.check
    with patch.object(holds.Holds, "check", check):
        yield


@bug("arriving")
def hold_outlives_its_time() -> Iterator[None]:
    """H4: reads under a hold succeed after its time is over."""
    with patch.object(holds.Holds, "find", lambda self, hold_id: self._live.get(hold_id)):
        yield


@bug("hasty")
def forgets_condemned_only() -> Iterator[None]:
    """H3: remembered chunks of a shard are not forgotten when a sweep of it ends."""

    def apply(self: gc_state.View, events: list[Event]) -> None:
        changed = [event for event in events if self._keys.parse_condemned(event.key) is not None]
        if any(event.kv is not None for event in changed):
            real(self, events)
            return
        with patch.object(known.Known, "forget_shards", lambda self, shards, shard_bits: None):
            real(self, events)

    real = gc_state.View._apply
    with patch.object(gc_state.View, "_apply", apply):
        yield


@bug("paired")
def announce_youngest() -> Iterator[None]:
    """A2: a node announces up to its youngest hold."""

    def announcement(self: holds.Holds) -> holds.Announcement:
        self.expire()
        births = (hold.born for hold in self._live.values() if hold.born is not None)
        return _unnamed(max(births, default=self._view.revision))

    with patch.object(holds.Holds, "announcement", announcement):
        yield


@bug("paired")
def announce_past_birth() -> Iterator[None]:
    """A2: a node announces one revision past the birth of its oldest hold."""

    def announcement(self: holds.Holds) -> holds.Announcement:
        self.expire()
        births = (hold.born + 1 for hold in self._live.values() if hold.born is not None)
        return _unnamed(min(births, default=self._view.revision))

    with patch.object(holds.Holds, "announcement", announcement):
        yield


@bug("paired")
def half_event() -> Iterator[None]:
    """A1: a view applies the first condemned shard of a transaction, and counts all of it as seen."""

    def apply(self: gc_state.View, events: list[Event]) -> None:
        changed = [event for event in events if self._keys.parse_condemned(event.key) is not None]
        real(self, [event for event in events if event not in changed[1:]])

    real = gc_state.View._apply
    with patch.object(gc_state.View, "_apply", apply):
        yield


def _unnamed(revision: int) -> holds.Announcement:
    """An announcement that names nothing."""
    return holds.Announcement(revision, b"", ())
