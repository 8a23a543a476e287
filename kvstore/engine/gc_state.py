"""What a node knows of garbage collection: what is condemned, whether holds protect, and whether there is space.

Matching, holding and publishing query it under one lock. Everything that must be atomic against an event (rules H1 to
H3) happens under ``lock``, and no I/O does.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.metrics import Counters, NodeCount
from kvstore.engine.capacity import NodeUsage
from kvstore.engine.presence_cache import PresenceCache
from kvstore.errors import InvalidRequest, Overloaded, RootMismatch, StoreFull
from kvstore.format.keyset import KeySet
from kvstore.meta.keys import Keys
from kvstore.meta.session import Session
from kvstore.meta.store import Absent, Compare, Event, KeyValue, Snapshot, ValueIs
from kvstore.meta.sweeps import NO_NONCE, Condemned, CondemnedSet, Seq
from kvstore.meta.usage import Capacity
from kvstore.root.posix import DiskFull

T = TypeVar("T")


class SpaceReservation(Protocol):
    """Room for one put."""

    def release(self) -> None:
        """Gives back what was not written of it. Idempotent; from any thread."""
        ...


class SpaceUsage(Protocol):
    """The room that a node takes on the root. Thread-safe."""

    @property
    def is_full(self) -> bool:
        """True while nothing can be evicted."""
        ...

    @property
    def written_bytes(self) -> int:
        """Bytes of the files that this node published."""
        ...

    def reserve(
        self, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None, wait_s: float = ...
    ) -> SpaceReservation:
        """Reserves the room that a put may take, perhaps after a wait of at most ``wait_s``. Raises Overloaded.

        ``missing_bytes`` is called before a wait, and returns how much of the put is not stored already.
        """
        ...

    def wrote(self, size_bytes: int) -> None:
        """Counts a published file."""
        ...

    def removed(self, size_bytes: int) -> None:
        """Counts a deleted file."""
        ...

    def refusal(self, full: DiskFull) -> Overloaded:
        """Notes that a write failed on a full disk; returns the caller's error."""
        ...


class GcState(ABC):
    """The garbage collection of one root as a node sees it. Thread-safe.

    ``ClusterGcState`` is that of a cluster, whose sweeps etcd announces, and of a process alone; ``host.HostView`` that
    of a root which the processes of one host share.
    """

    lock: AbstractContextManager[Any]
    """Nothing that is condemned changes under it, in a cluster."""
    usage: SpaceUsage
    """The space that the node takes."""
    revision: int
    """How far it has followed sweeps: the birth of a hold."""

    @property
    @abstractmethod
    def protects(self) -> bool:
        """True if holds taken now keep collectors away."""

    @property
    @abstractmethod
    def is_calm(self) -> bool:
        """True if nothing is condemned."""

    @property
    def is_full(self) -> bool:
        """True while nothing can be evicted: then puts are refused."""
        return self.usage.is_full

    @property
    def sweeps(self) -> object:
        """A value that changes whenever a sweep begins or ends, or could do so unseen."""
        return 0

    @property
    def listings(self) -> int:
        """How often the root of a host was listed."""
        return 0

    @abstractmethod
    def _leading(self, addresses: Sequence[Address]) -> int:
        """Returns how many leading addresses are not condemned."""

    def leading(self, wanted: KeySet) -> int:
        """Returns how many leading chunks are not condemned; hold ``lock`` if that must stay true."""
        return len(wanted) if self.is_calm else self._leading(wanted.addresses)

    def condemns(self, address: Address) -> bool:
        """True if an address counts as absent (rule H1)."""
        return not self._leading((address,))

    def allowed(self, addresses: Sequence[Address]) -> Sequence[int]:
        """Returns the offsets of those that are not condemned."""
        if self._leading(addresses) == len(addresses):
            return range(len(addresses))
        return [at for at, address in enumerate(addresses) if not self.condemns(address)]

    def unswept(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        """Returns which chunks are not condemned."""
        if self.is_calm:
            return np.ones(len(wanted), np.bool_)
        return np.array([not self.condemns(address) for address in wanted.addresses], np.bool_)

    def stays(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        """Returns which chunks that a put has just written or found are still there, as far as sweeps go."""
        return self.unswept(wanted)

    def protect(self, packed: bytes) -> Any:  # noqa: B027 - a cluster has nothing to do here
        """Keeps chunks from being evicted on a host until ``unprotect`` of what it returns. Look for them after it.

        In a cluster holds are announced instead (rules A1 to A3).
        """

    def unprotect(self, mark: Any) -> None:  # noqa: B027
        """Ends what ``protect`` returned, once."""

    def settle(self, wanted: KeySet) -> bool:
        """Waits a moment for chunks that are being deleted on a host; False if they still are."""
        return True

    @abstractmethod
    def check_room(self, size_bytes: int = 0) -> None:
        """Raises Overloaded for a put that will never fit, and while nothing can be evicted."""


class ChainBroken(Exception):
    """An event does not continue the view's chain: etcd was restored (rule C1), or its content is invalid."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A sweep in flight: at which revision it condemned, and which chunks."""

    stamp: int
    members: CondemnedSet


class ClusterGcState(GcState):
    """One node's view of one root. Thread-safe.

    Outside a session (``end``) it protects nothing, and condemns nothing.
    """

    def __init__(self, keys: Keys, shard_bits: int, known: PresenceCache, counters: Counters) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.revision = 0
        self.pace_s = 0.0
        self.usage: NodeUsage = NodeUsage(partial(counters.add, NodeCount.PUT_REFUSED_UNCOUNTED))
        self._counters = counters
        self._keys = keys
        self._shard_bits = shard_bits
        self._known = known
        self._seq: bytes | None = None
        self._nonce = NO_NONCE
        self._open: dict[int, _Open] = {}
        self._session: Session | None = None

    @property
    def protects(self) -> bool:
        """True if holds taken now keep collectors away: in a live session, with a view of it."""
        return self._session is not None and self._session.alive

    @property
    def seq_is_seen(self) -> Compare:
        """A condition for etcd: the chain of sweeps ends where this view ends (rule A3)."""
        return Absent(self._keys.gc_seq) if self._seq is None else ValueIs(self._keys.gc_seq, self._seq)

    def is_last(self, seq: bytes | None) -> bool:
        """True if the chain of sweeps, as read from etcd, ends where this view ends."""
        return seq == self._seq

    @property
    def sweeps(self) -> tuple[bool, bytes | None]:
        """A value that changes whenever a sweep begins or ends, or could do so unseen."""
        return self.protects, self._seq

    @property
    def is_calm(self) -> bool:
        """True if no sweep is in flight: nothing is condemned."""
        return not self._open

    def _leading(self, addresses: Sequence[Address]) -> int:
        open_, shift = self._open, 16 - self._shard_bits
        for index, address in enumerate(addresses if open_ else ()):
            sweep = open_.get((address[0] << 8 | address[1]) >> shift)
            if sweep is not None and address in sweep.members:
                return index
        return len(addresses)

    def check_room(self, size_bytes: int = 0) -> None:
        """Raises StoreFull while collectors publish that the root is full."""
        if self.is_full:
            self._counters.add(NodeCount.PUT_REFUSED_FULL)
            raise StoreFull(
                "the root is full until garbage collection has made room, which it cannot take from what is held or "
                "pinned: release what is not needed, back off, and put again later"
            )

    def stamps(self, after: int) -> list[int]:
        """Returns the revisions after ``after`` at which sweeps in flight condemned."""
        return [sweep.stamp for sweep in list(self._open.values()) if sweep.stamp > after]

    def swept(self, held: Sequence[tuple[bytes, int]]) -> list[list[tuple[int, Address]]]:
        """Returns which chunks sweeps in flight condemn, each with its sweep's stamp, for each of ``held``.

        Those are packed addresses, and the revision after which a sweep must have begun. For the thread that changes
        the view.
        """
        open_, shift = self._open, 16 - self._shard_bits
        is_open = np.zeros(1 << self._shard_bits, np.bool_)
        is_open[list(open_)] = True
        found = []
        for packed, after in held:
            shards = np.frombuffer(packed, ">u2")[:: ADDRESS_BYTES // 2] >> shift
            at_all = np.flatnonzero(is_open[shards]).tolist()
            asked = ((open_[int(shards[at])], packed[at * ADDRESS_BYTES : (at + 1) * ADDRESS_BYTES]) for at in at_all)
            found.append(
                [(sweep.stamp, Address(one)) for sweep, one in asked if sweep.stamp > after and one in sweep.members]
            )
        return found

    # Changes: called under ``lock`` by the follower, which has checked under it that it still follows this session.

    def begin(self, snapshot: Snapshot, session: Session) -> None:
        """Begins the view of a session: ``snapshot`` is of ``gc/``, read after the session's key was put (V1)."""
        self.usage.begin()
        self._read(snapshot)
        self._session = session

    def reread(self, snapshot: Snapshot) -> None:
        """Replaces the view after a lost watch (rule V3). Under the same lock the caller marks holds as oldest."""
        self._read(snapshot)

    def end(self) -> None:
        """Ends the session: nothing is protected any more, nothing remembered (rule V2)."""
        self._session = None
        self._open = {}
        self.usage.end()
        self._known.clear()

    def apply(self, events: Iterable[Event]) -> None:
        """Applies events, revision by revision. Raises ChainBroken after it applied those before the break."""
        assert self.lock.locked()
        for revision, together in groupby(events, key=lambda event: event.revision):
            self._apply(list(together))
            self.revision = revision

    def _apply(self, events: list[Event]) -> None:
        link = next((event for event in events if event.key == self._keys.gc_seq), None)
        if link is not None:
            self._follow(link)
        changed = []
        for event in events:
            shard = self._keys.parse_condemned(event.key)
            if event.key == self._keys.gc_capacity:
                self._read_capacity(event.kv)
            elif shard is not None:
                if link is None or shard >> self._shard_bits:
                    raise ChainBroken(f"{event.key} changed without a link of the chain, or is not a shard here")
                changed.append(shard)
                self._open.pop(shard, None)
                if event.kv is not None:
                    self._open[shard] = _open(event.kv)
        if changed:
            # Forget all of their shards, not only the victims: the memory has no room for whole addresses (rule H3).
            # Also when a sweep ends: a look that began during it may have found a chunk that the sweep was about to
            # take.
            self._known.forget_shards(changed, self._shard_bits)

    def _follow(self, link: Event) -> None:
        if link.kv is None:
            raise ChainBroken("the chain of sweeps was deleted")
        seq = _decoded(Seq.from_json, link.kv.value)
        if seq.prev != self._nonce:
            raise ChainBroken(f"the chain of sweeps goes on from {seq.prev.hex()}, expected {self._nonce.hex()}")
        self._seq, self._nonce, self.pace_s = link.kv.value, seq.nonce, seq.pace_s

    def _read(self, snapshot: Snapshot) -> None:
        found: dict[int, _Open] = {}
        seq, capacity, self._nonce = None, None, NO_NONCE
        for kv in snapshot.items:
            shard = self._keys.parse_condemned(kv.key)
            if shard is not None:
                found[shard] = _open(kv)
            elif kv.key == self._keys.gc_seq:
                link = _decoded(Seq.from_json, kv.value)
                seq, self._nonce, self.pace_s = kv.value, link.nonce, link.pace_s
            elif kv.key == self._keys.gc_capacity:
                capacity = kv
        self._read_capacity(capacity)
        self._seq, self._open, self.revision = seq, found, snapshot.revision
        self._known.clear()

    def _read_capacity(self, kv: KeyValue | None) -> None:
        """Reads a record that orders nothing in the chain. An unreadable one counts as absent."""
        try:
            self.usage.received(None if kv is None else Capacity.from_json(kv.value), kv.create_revision if kv else 0)
        except InvalidRequest:
            self.usage.received(None)


def _open(kv: KeyValue) -> _Open:
    return _Open(kv.create_revision, CondemnedSet(_decoded(Condemned.from_bytes, kv.value)))


def _decoded(decode: Callable[[bytes], T], value: bytes) -> T:
    try:
        return decode(value)
    except RootMismatch as error:
        raise ChainBroken(str(error)) from error
