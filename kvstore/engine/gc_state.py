"""A node's view of garbage collection, and its holds.

``GcState`` has what is condemned, whether holds protect, and whether there is space. Matching, holding and publishing
query it under one lock. Everything that must be atomic against an event (rules H1 to H3) happens under ``lock``, and no
I/O does. ``Holds`` are in memory: they protect matched chunks until the load that follows.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.clock import Clock, Ids
from kvstore.core.metrics import Counters, NodeCount
from kvstore.engine.capacity import NodeUsage
from kvstore.engine.chunk_store import PresenceCache
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken, InvalidRequest, Overloaded, RootMismatch, StoreFull
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.host.eviction import settle_left
from kvstore.host.tables import BATCH_MAX, RING, HoldTable, HostRoom, Number, Run, Shared
from kvstore.meta.keys import Keys, part_of
from kvstore.meta.session import Session
from kvstore.meta.store import Absent, Compare, Event, KeyValue, Snapshot, ValueIs
from kvstore.meta.sweeps import NO_NONCE, Condemned, Seq
from kvstore.meta.usage import Capacity
from kvstore.root.posix import error_of
from kvstore.tiers.memory import Slots

T = TypeVar("T")


class GcState(ABC):
    """The garbage collection of one root as a node sees it. Thread-safe.

    ``ClusterGcState`` is that of a cluster, whose sweeps etcd announces, and of a process alone; ``host.HostView`` that
    of a root which the processes of one host share.
    """

    lock: AbstractContextManager[Any]
    """Nothing that is condemned changes under it, in a cluster."""
    usage: NodeUsage | HostRoom
    """The space that the node takes."""
    revision: int
    """How far it has followed sweeps: the birth of a hold."""

    @property
    @abstractmethod
    def protects(self) -> bool:
        """True if holds taken now keep collectors away."""

    @property
    @abstractmethod
    def condemned(self) -> frozenset[bytes]:
        """The chunks that count as absent now (rule H1)."""

    @property
    def is_calm(self) -> bool:
        """True if nothing is condemned."""
        return not self.condemned

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

    def leading(self, wanted: KeySet) -> int:
        """Returns how many leading chunks are not condemned; hold ``lock`` if that must stay true."""
        condemned = self.condemned
        if not condemned or condemned.isdisjoint(wanted.addresses):
            return len(wanted)
        return next(at for at, address in enumerate(wanted.addresses) if address in condemned)

    def condemns(self, address: Address) -> bool:
        """True if an address counts as absent (rule H1)."""
        return address in self.condemned

    def allowed(self, addresses: Sequence[Address]) -> Sequence[int]:
        """Returns the offsets of those that are not condemned."""
        condemned = self.condemned
        if condemned.isdisjoint(addresses):
            return range(len(addresses))
        return [at for at, address in enumerate(addresses) if address not in condemned]

    def unswept(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        """Returns which chunks are not condemned."""
        condemned = self.condemned
        if not condemned:
            return np.ones(len(wanted), np.bool_)
        return np.array([address not in condemned for address in wanted.addresses], np.bool_)

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
    victims: frozenset[bytes]


class ClusterGcState(GcState):
    """One node's view of one root. Thread-safe.

    Outside a session (``end``) it protects nothing, and condemns nothing.
    """

    def __init__(self, keys: Keys, known: PresenceCache, counters: Counters) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.revision = 0
        self.pace_s = 0.0
        self.usage: NodeUsage = NodeUsage(partial(counters.add, NodeCount.PUT_REFUSED_UNCOUNTED))
        self._counters = counters
        self._keys = keys
        self._known = known
        self._seq: bytes | None = None
        self._nonce = NO_NONCE
        self._open: dict[int, _Open] = {}
        self._condemned: frozenset[bytes] = frozenset()
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
    def condemned(self) -> frozenset[bytes]:
        return self._condemned

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
        found = []
        for packed, after in held:
            open_ = {part: sweep for part, sweep in self._open.items() if sweep.stamp > after}
            each = (packed[at : at + ADDRESS_BYTES] for at in range(0, len(packed) if open_ else 0, ADDRESS_BYTES))
            asked = ((open_.get(part_of(one)), one) for one in each)
            found.append([(sweep.stamp, Address(one)) for sweep, one in asked if sweep and one in sweep.victims])
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
        self._condemn({})
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
        open_, changed = dict(self._open), list[_Open]()
        for event in events:
            part = self._keys.parse_condemned(event.key)
            if event.key == self._keys.gc_capacity:
                self._read_capacity(event.kv)
            elif part is not None:
                if link is None:
                    raise ChainBroken(f"{event.key} changed without a link of the chain")
                if (ended := open_.pop(part, None)) is not None:
                    changed.append(ended)
                if event.kv is not None:
                    open_[part] = begun = _open(event.kv)
                    changed.append(begun)
        if changed:
            self._condemn(open_)
            # Rule H3. Also when a sweep ends: a look that began during it may have found a chunk that the sweep was
            # about to take.
            self._known.forget_each(b"".join(_victims(changed)))

    def _condemn(self, open_: dict[int, _Open]) -> None:
        self._open, self._condemned = open_, _victims(open_.values())

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
            part = self._keys.parse_condemned(kv.key)
            if part is not None:
                found[part] = _open(kv)
            elif kv.key == self._keys.gc_seq:
                link = _decoded(Seq.from_json, kv.value)
                seq, self._nonce, self.pace_s = kv.value, link.nonce, link.pace_s
            elif kv.key == self._keys.gc_capacity:
                capacity = kv
        self._read_capacity(capacity)
        self._condemn(found)
        self._seq, self.revision = seq, snapshot.revision
        self._known.clear()

    def _read_capacity(self, kv: KeyValue | None) -> None:
        """Reads a record that orders nothing in the chain. An unreadable one counts as absent."""
        try:
            self.usage.received(None if kv is None else Capacity.from_json(kv.value), kv.create_revision if kv else 0)
        except InvalidRequest:
            self.usage.received(None)


def _victims(sweeps: Iterable[_Open]) -> frozenset[bytes]:
    return frozenset().union(*(sweep.victims for sweep in sweeps))


def _open(kv: KeyValue) -> _Open:
    return _Open(kv.create_revision, _decoded(Condemned.from_bytes, kv.value).victims)


def _decoded(decode: Callable[[bytes], T], value: bytes) -> T:
    try:
        return decode(value)
    except RootMismatch as error:
        raise ChainBroken(str(error)) from error


# One process's view of evictions on its host: the chunks that are being evicted, and those that are gone.
#
# Everything here reads mapped memory: a match or a hold costs no system call.


SETTLE_S = 1.0
POLL_S = 0.001
_TAIL, _SETTLED = int(Number.TAIL), int(Number.SETTLED)
NOTHING: frozenset[bytes] = frozenset()


class HostGcState(GcState):
    """The evictions of one root as this process sees them. Thread-safe."""

    revision = 0

    def __init__(self, folder: str, shared: Shared, table: HoldTable, known: PresenceCache, usage: HostRoom) -> None:
        self.lock = nullcontext()
        """Nothing: a hold needs no lock here."""
        self.usage: HostRoom = usage
        self._folder = folder
        self._shared = shared
        self._numbers = shared.numbers
        self._table = table
        self._known = known
        self._changes = threading.Lock()
        self._seen = shared[Number.TAIL]
        """Entries of the log up to here are forgotten."""
        self._unsettled = NOTHING
        self._read_log(self._seen)

    # Holds

    @property
    def protects(self) -> bool:
        """True until the store is closed; False in a forked child."""
        return self._table.is_open

    def protect(self, packed: bytes) -> Run | None:
        """Keeps chunks from being evicted until ``unprotect``; look for them, or ask ``leading``, after this."""
        if not packed or not self._table.is_open:
            return None
        try:
            run = self._table.add(packed)
        except OSError as cause:
            raise error_of("write", self._table.path, cause) from cause
        self._shared.fence()  # the table, then the log
        return run

    def unprotect(self, run: Run | None) -> None:
        if run is not None:
            self._table.remove(run)

    # What is condemned

    @property
    def listings(self) -> int:
        return self._shared[Number.LISTINGS]

    def settle(self, wanted: KeySet) -> bool:
        """Waits, up to SETTLE_S, for the batch that is being evicted if it has any of these chunks."""
        ends_s = time.monotonic() + SETTLE_S
        while self.leading(wanted) < len(wanted):
            if time.monotonic() > ends_s:
                settle_left(self._folder, self._shared)
                return self.leading(wanted) == len(wanted)
            time.sleep(POLL_S)
        return True

    def stays(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        """Returns that all chunks of a put are there: it kept them."""
        return np.ones(len(wanted), np.bool_)

    # Room

    def check_room(self, size_bytes: int = 0) -> None:
        self.usage.check(size_bytes)

    @property
    def condemned(self) -> frozenset[bytes]:
        """The chunks of a batch that is not settled. Forgets what the log names up to now."""
        tail = self._numbers[_TAIL]
        if tail != self._seen or (self._unsettled and self._numbers[_SETTLED] >= tail):
            with self._changes:
                self._read_log(tail)
        return self._unsettled

    def _read_log(self, tail: int) -> None:
        """Applies the log up to ``tail``; the order of the loads is that of ``tests/model/host.py``."""
        shared, settled = self._shared, self._shared[Number.SETTLED]
        if tail < self._seen:
            return  # another thread was faster
        first = min(self._seen, max(settled, tail - BATCH_MAX))
        is_overrun = tail - first > RING - BATCH_MAX
        entries = b"" if is_overrun else shared.entries(first, tail)
        is_overrun = is_overrun or shared[Number.TAIL] + BATCH_MAX - first > RING
        if is_overrun:
            self._known.clear()
            first = min(tail, max(settled, tail - BATCH_MAX))  # more may be settled by now than ``tail``
            entries = shared.entries(first, tail)
        elif tail > self._seen:
            self._known.forget_each(entries[(self._seen - first) * ADDRESS_BYTES :])
        settled = shared[Number.SETTLED]
        left = entries[max(0, settled - first) * ADDRESS_BYTES :]
        if self._unsettled:
            # Forget them once more: a lookup that began before their deletion may have cached them since.
            self._known.forget_each(b"".join(self._unsettled))
        self._unsettled = frozenset(left[at : at + ADDRESS_BYTES] for at in range(0, len(left), ADDRESS_BYTES))
        self._seen = tail


BEFORE_ALL = -1
"""The birth of a hold that no longer has a known place among the sweeps."""


class Announcement(NamedTuple):
    """An announcement of a node (rules A1, A2).

    ``held`` are the packed addresses that it holds of the sweeps up to ``revision``, and with them what else those
    holds are on, if there is room: so that a collector leaves their prompts whole. ``on`` is what they are on.
    """

    revision: int
    held: bytes
    on: Sequence[KeySet]


@dataclass(slots=True, eq=False)
class ChunkHold:
    """``count`` leading chunks of ``chain``, held until released or until ``ends_s`` (monotonic).

    Renewing a leased hold moves ``ends_s``, to ``last_s`` at most. ``born`` is the revision of the view at its birth;
    None if the hold protects nothing, because there was no session.
    """

    id: bytes
    chain: ChunkKeys
    count: int
    ends_s: float
    born: int | None
    slots: Slots | None = None
    """Its chunks that are in memory, referenced as long as the hold lives (rule R3)."""
    last_s: float = 0.0
    whatever: bool = False
    """It is on what a look finds, whatever that is."""
    found: tuple[KeySet, ...] | None = None
    """The result of that look; None while it runs."""
    was_named: bool = False
    mark: Any = None
    """The mark that ``GcState.protect`` returned."""

    @property
    def on(self) -> tuple[KeySet, ...] | None:
        """The chunks that it may hold; None while the lookup runs: then it covers every chunk."""
        return self.found if self.whatever else (self.chain,)

    @property
    def tokens(self) -> int:
        return self.count * self.chain.namespace.layout.chunk_tokens


class Holds:
    """The table of live holds; thread-safe, bounded.

    ``used`` receives held chunks that a sweep was about to delete, and must not block.
    """

    def __init__(
        self,
        view: GcState,
        limits: Limits,
        counters: Counters,
        clock: Clock,
        ids: Ids,
        used: Callable[[KeySet], object],
    ) -> None:
        self._view = view
        self._holds_max = limits.holds_max
        self._hold_max_s = limits.hold_max_s
        self._linger_s = limits.hold_linger_s
        self._names_max = limits.held_names_max
        self._counters = counters
        self._clock = clock
        self._ids = ids
        self._used = used
        self._lock = threading.Lock()
        self._live: dict[bytes, ChunkHold] = {}
        self._lingering: list[tuple[float, ChunkHold]] = []
        """Holds that have ended, and until when each is named."""

    def __len__(self) -> int:
        return len(self._live)

    def take(
        self, chain: ChunkKeys, ttl_s: float | None = None, *, whatever: bool = False, asked: bytes = b""
    ) -> ChunkHold:
        """Takes a hold on the leading chunks that are not condemned, before the caller looks them up (rules H1, H2).

        With ``whatever`` it is on all that there are, until ``ChunkHold.found`` is set; ``asked`` are the packed
        addresses of those that may be found, if they are known. Raises Overloaded.
        """
        seconds = min(ttl_s or self._hold_max_s, self._hold_max_s)
        last_s = self._clock.monotonic_s() + seconds
        hold = ChunkHold(self._ids.fresh(), chain, 0, last_s, None, last_s=last_s, whatever=whatever)
        hold.mark = self._view.protect(asked or chain.packed_addresses)
        # One step against every event: no event may come between the look at condemned chunks and the birth of the
        # hold.
        with self._view.lock, self._lock:
            if len(self._live) >= self._holds_max:
                self._expire()
            if len(self._live) >= self._holds_max:
                self._view.unprotect(hold.mark)
                raise Overloaded(f"{self._holds_max} holds are alive: release some, or back off")
            hold.count = self._view.leading(chain)
            hold.born = self._view.revision if self._view.protects else None
            self._live[hold.id] = hold
        if hold.count < len(chain):
            hold.chain = chain.leading(hold.count)
            self._counters.add(NodeCount.CHUNKS_CONDEMNED, len(chain) - hold.count)
        return hold

    def keep(self, hold: ChunkHold, slots: Slots) -> None:
        with self._lock:
            hold.slots = slots
            is_live = hold.id in self._live
        if not is_live:
            slots.release()

    def find(self, hold_id: bytes) -> ChunkHold | None:
        hold = self._live.get(hold_id)
        return hold if hold and hold.ends_s > self._clock.monotonic_s() else None

    def check(self, hold: ChunkHold) -> None:
        """Raises HoldBroken if the hold has ended: after that nothing may be read under it (rule H4)."""
        if self.find(hold.id) is None or (hold.born is not None and not self._view.protects):
            raise HoldBroken("the hold has ended (released, past its time, or its session was lost): match again")

    def renew(self, hold: ChunkHold, lease_s: float) -> bool:
        """Makes a hold end ``lease_s`` from now unless it is renewed again; False if it has ended.

        One step against ``expire``: a hold that was announced as gone cannot come back to life (rule A2).
        """
        with self._lock:
            now_s = self._clock.monotonic_s()
            is_live = hold.id in self._live and hold.ends_s > now_s
            if is_live:
                hold.ends_s = min(hold.last_s, now_s + lease_s)
            return is_live

    def release(self, hold: ChunkHold) -> None:
        with self._lock:
            is_live = self._live.pop(hold.id, None) is not None
            if is_live and hold.was_named:
                self._linger(hold)
        if is_live:
            self._view.unprotect(hold.mark)
        if hold.slots is not None:
            hold.slots.release()

    def announcement(self, view: ClusterGcState) -> Announcement:
        """Returns what may be announced: the newest revision that this node has seen, and the chunks that a hold from
        before their sweep has (rules A1, A2). For the thread that changes the view.

        The revision is older if a hold does not know its chunks yet, or if there are too many to name.
        """
        with view.lock, self._lock:
            self._expire()
            now_s, revision = self._clock.monotonic_s(), view.revision
            self._lingering = [(until_s, hold) for until_s, hold in self._lingering if until_s > now_s]
            protecting = [*self._live.values(), *(hold for _, hold in self._lingering)]
        # Holds that are taken from here on have seen every sweep of the view; so have most of the others.
        newest = max(view.stamps(after=BEFORE_ALL), default=BEFORE_ALL)
        older = [(hold, hold.on, hold.born) for hold in protecting if hold.born is not None and hold.born < newest]
        revision = min((born for _, on, born in older if on is None), default=revision)
        parts = [(hold, part, born) for hold, on, born in older for part in on or ()]
        swept = view.swept([(part.packed_addresses, born) for _, part, born in parts])
        condemned = sorted({one for found in swept for one in found if one[0] <= revision})
        if len(condemned) > self._names_max:
            revision = condemned[self._names_max][0] - 1
        named, used = {address for stamp, address in condemned if stamp <= revision}, list[KeySet]()
        for (hold, part, _), found in zip(parts, swept, strict=True):
            if any(stamp <= revision for stamp, _ in found):
                hold.was_named = True
                used.append(part)
                if len(named) + len(part) <= self._names_max:
                    named.update(part.addresses)
        return Announcement(revision, b"".join(named), used)

    def announced(self, announcement: Announcement) -> None:
        """Renews what was named, once that is announced: so the next round chooses other chunks."""
        for wanted in announcement.on:
            self._used(wanted)

    def age_all(self) -> None:
        """Marks all holds as older than everything (rule V3); called under the view's lock."""
        with self._lock:
            for hold in (*self._live.values(), *(hold for _, hold in self._lingering)):
                if hold.born is not None:
                    hold.born = BEFORE_ALL

    def drop_all(self) -> None:
        with self._lock:
            self._drop(lambda hold: True)
            self._lingering.clear()

    def drop_protecting(self) -> None:
        """Ends the holds that a lost session protected (rule V2). Holds taken since then relied on no session."""
        with self._lock:
            self._drop(lambda hold: hold.born is not None)
            self._lingering.clear()

    def expire(self) -> bool:
        """Ends the holds that are past their time; True, for a session that does so before each keepalive."""
        with self._lock:
            self._expire()
        return True

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        ended_count = self._drop(lambda hold: hold.ends_s <= now_s)
        if ended_count:
            self._counters.add(NodeCount.HOLDS_EXPIRED, ended_count)

    def _drop(self, is_over: Callable[[ChunkHold], bool]) -> int:
        """Ends the holds for which ``is_over`` is true, under the lock; returns how many."""
        ended = [hold for hold in self._live.values() if is_over(hold)]
        for hold in ended:
            del self._live[hold.id]
            self._view.unprotect(hold.mark)
            if hold.was_named:
                self._linger(hold)
            if hold.slots is not None:
                hold.slots.release()
        return len(ended)

    def _linger(self, hold: ChunkHold) -> None:
        self._lingering.append((self._clock.monotonic_s() + self._linger_s, hold))
