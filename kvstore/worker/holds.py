"""Holds of clients by id. Bounded more tightly than a node's own: each keeps a prompt in memory.

Each hold is leased: a client that was killed renews nothing, so its holds end (gc/PROTOCOL.md, H4).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from kvstore.errors import HoldBroken, Overloaded
from kvstore.node.holds import Hold
from kvstore.sources import Clock


class ClientHolds:
    """The live holds of all clients; thread-safe. ``release`` ends a hold in the node, ``renew`` its lease there.

    With ``tells_tenants`` one tenant has at most half of them: others need some too.
    """

    def __init__(
        self,
        holds_max: int,
        tokens_max: int,
        release: Callable[[Hold], None],
        renew: Callable[[Hold], bool],
        clock: Clock,
        *,
        tells_tenants: bool = False,
    ) -> None:
        self.holds_max = holds_max
        """May change at any time, like ``tokens_max``: live holds stay."""
        self.tokens_max = tokens_max
        self._release = release
        self._renew = renew
        self._clock = clock
        self._lock = threading.Lock()
        self._tells_tenants = tells_tenants
        self._live: dict[bytes, Hold] = {}
        self._tokens = 0
        self._holds_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, hold: Hold) -> None:
        """Leases a hold: keeps it until it is released, expires, or is not renewed.

        Raises Overloaded if there are too many, and releases it.
        """
        size = len(hold.chain.tokens)
        with self._lock:
            fits = len(self._live) < self.holds_max and self._tokens + size <= self.tokens_max
            fits = fits and not (self._tells_tenants and self._is_over_half(_tenant_of(hold), size))
            if fits:
                self._renew(hold)
                self._live[hold.id] = hold
                self._note(hold, 1)
        if not fits:
            self._release(hold)
            raise Overloaded(
                f"clients may hold at most {self.holds_max} prompts and {self.tokens_max} tokens here: "
                "release some, or back off"
            )

    def find(self, hold_id: bytes) -> Hold:
        """Returns the live hold with this id, renewed. Raises HoldBroken if it has ended."""
        hold = self._live.get(hold_id)
        if hold is None or not self._renew(hold):
            raise HoldBroken(
                "the hold has ended (released, past its time, not renewed, or the worker was restarted): match again"
            )
        return hold

    def renew(self, hold_id: bytes) -> bool:
        """Renews the lease of a hold; False if it has ended."""
        hold = self._live.get(hold_id)
        return hold is not None and self._renew(hold)

    def peek(self, hold_id: bytes) -> Hold | None:
        """Returns the hold with this id, even if it has expired; None if it was released."""
        return self._live.get(hold_id)

    def release(self, hold_id: bytes) -> bool:
        """Ends a hold; False if it had already ended."""
        with self._lock:
            hold = self._live.pop(hold_id, None)
            if hold is not None:
                self._note(hold, -1)
        if hold is not None:
            self._release(hold)
        return hold is not None

    def expire(self) -> None:
        """Ends expired holds."""
        now_s = self._clock.monotonic_s()
        for hold_id in [hold.id for hold in list(self._live.values()) if hold.ends_s <= now_s]:
            self.release(hold_id)

    def _note(self, hold: Hold, count: int) -> None:
        tenant, tokens = _tenant_of(hold), count * len(hold.chain.tokens)
        self._tokens += tokens
        self._holds_of[tenant] += count
        self._tokens_of[tenant] += tokens
        if not self._holds_of[tenant]:
            del self._holds_of[tenant], self._tokens_of[tenant]

    def _is_over_half(self, tenant: str, tokens: int) -> bool:
        """True if one more hold is too much for a tenant; its only one never is."""
        held = self._holds_of[tenant]
        is_over = held >= self.holds_max // 2 or self._tokens_of[tenant] + tokens > self.tokens_max // 2
        return held > 0 and is_over


def _tenant_of(hold: Hold) -> str:
    return hold.chain.namespace.tenant
