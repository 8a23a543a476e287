"""Holds of clients, by the id they were told. Bounded more tightly than a node's own: each keeps a prompt in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore.errors import HoldBroken, Overloaded
from kvstore.node.holds import Hold
from kvstore.sources import Clock


class ClientHolds:
    """The live holds of all clients; thread-safe. ``release`` ends one in the node."""

    def __init__(self, holds_max: int, tokens_max: int, release: Callable[[Hold], None], clock: Clock) -> None:
        self.holds_max = holds_max
        """May change at any time, as the next one: what is held stays."""
        self.tokens_max = tokens_max
        self._release = release
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[bytes, Hold] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, hold: Hold) -> None:
        """Keeps a hold until it is released or over. Raises Overloaded where there are too many, and releases it."""
        size = len(hold.chain.tokens)
        with self._lock:
            fits = len(self._live) < self.holds_max and self._tokens + size <= self.tokens_max
            if fits:
                self._live[hold.id] = hold
                self._tokens += size
        if not fits:
            self._release(hold)
            raise Overloaded(
                f"clients hold {len(self._live)} prompts of {self._tokens} tokens here, and {self.holds_max} "
                f"prompts or {self.tokens_max} tokens are the limit: release some, or back off"
            )

    def find(self, hold_id: bytes) -> Hold:
        """The live hold with this id. Raises HoldBroken where it has ended."""
        hold = self._live.get(hold_id)
        if hold is None or hold.ends_s <= self._clock.monotonic_s():
            raise HoldBroken("the hold has ended (released, past its time, or the worker was restarted): match again")
        return hold

    def peek(self, hold_id: bytes) -> Hold | None:
        """The hold with this id, be it over or not; None where it was released."""
        return self._live.get(hold_id)

    def release(self, hold_id: bytes) -> bool:
        """Ends a hold; False where it had ended already."""
        with self._lock:
            hold = self._live.pop(hold_id, None)
            if hold is not None:
                self._tokens -= len(hold.chain.tokens)
        if hold is not None:
            self._release(hold)
        return hold is not None

    def expire(self) -> None:
        """Ends the holds that are past their time."""
        now_s = self._clock.monotonic_s()
        for hold_id in [hold.id for hold in list(self._live.values()) if hold.ends_s <= now_s]:
            self.release(hold_id)
