"""What this node promises not to lose between a match and the load that follows: the holds, in memory.

Kept apart from reading because garbage collection asks it one question: is there a hold older than a revision?
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore.address import Chain
from kvstore.errors import HoldBroken, Overloaded
from kvstore.node.counters import Counters
from kvstore.sources import Clock, Ids


@dataclass(slots=True)
class Hold:
    """``count`` leading chunks of ``chain``, held until released or until ``ends_s`` (monotonic)."""

    id: bytes
    chain: Chain
    count: int
    ends_s: float

    @property
    def tokens(self) -> int:
        """Leading tokens that are held."""
        return self.count * self.chain.namespace.layout.chunk_tokens


class Holds:
    """The table of live holds; thread-safe, bounded."""

    def __init__(self, holds_max: int, hold_max_s: float, counters: Counters, clock: Clock, ids: Ids) -> None:
        self._holds_max = holds_max
        self._hold_max_s = hold_max_s
        self._counters = counters
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        self._live: dict[bytes, Hold] = {}

    def __len__(self) -> int:
        return len(self._live)

    def take(self, chain: Chain, ttl_s: float | None = None) -> Hold:
        """A hold on the whole chain, before anybody looks what of it exists (rule H2). Raises Overloaded."""
        seconds = min(ttl_s or self._hold_max_s, self._hold_max_s)
        hold = Hold(self._ids.fresh(), chain, len(chain), self._clock.monotonic_s() + seconds)
        with self._lock:
            if len(self._live) >= self._holds_max:
                self._expire()
            if len(self._live) >= self._holds_max:
                raise Overloaded(f"{self._holds_max} holds are alive: release some, or back off")
            self._live[hold.id] = hold
        return hold

    def find(self, hold_id: bytes) -> Hold | None:
        """The live hold with this id."""
        hold = self._live.get(hold_id)
        return hold if hold and hold.ends_s > self._clock.monotonic_s() else None

    def check(self, hold: Hold) -> None:
        """Raises HoldBroken where the hold has ended: after that nothing may be read under it (rule H4)."""
        if self.find(hold.id) is None:
            raise HoldBroken("the hold has ended (released, past its time, or its session was lost): match again")

    def release(self, hold: Hold) -> None:
        """Ends a hold; idempotent."""
        with self._lock:
            self._live.pop(hold.id, None)

    def drop_all(self) -> None:
        """Ends every hold, as when the session is lost (rule V2)."""
        with self._lock:
            self._live.clear()

    def expire(self) -> None:
        """Removes the holds that are past their time."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        ended = [hold_id for hold_id, hold in self._live.items() if hold.ends_s <= now_s]
        for hold_id in ended:
            del self._live[hold_id]
        self._counters.add("holds_expired", len(ended))
