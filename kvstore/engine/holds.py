"""The holds, in memory: they protect matched chunks until the load that follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.core.clock import Clock, Ids
from kvstore.core.metrics import Counters, NodeCount
from kvstore.engine.gc_state import ClusterGcState, GcState
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken, Overloaded
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.tiers.memory import Slots

BEFORE_ALL = -1
"""The birth of a hold that no longer has a known place among the sweeps."""


class Announcement(NamedTuple):
    """What a node may announce (rules A1, A2).

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
    """What that look has found; None while it goes on."""
    was_named: bool = False
    mark: Any = None
    """What ``GcState.protect`` returned."""

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

    def expire(self) -> None:
        with self._lock:
            self._expire()

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
