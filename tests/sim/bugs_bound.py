"""Bugs of the bound on one host: claims before a collector's word, and the level that a collector leaves (rule S6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from kvstore_gc.signs import RoomSign

from kvstore.meta import bounds
from kvstore.meta.bounds import Bounds, Claim
from kvstore.meta.interface import Absent, Delete, Put
from kvstore.node.claims import Claims
from kvstore.node.usage import NodeUsage, Reserved
from tests.sim.planting import bug


@bug("host_claims")
def claims_blind() -> Iterator[None]:
    """A claim adds to the level that it read, whatever the level is by then."""

    def claim(
        self: Bounds,
        size_bytes: int,
        max_bytes: int | None,
        is_empty: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> Claim | None:
        found = self._meta.get(self._keys.level, timeout_s)
        if found is None:
            return real(self, size_bytes, max_bytes, is_empty, timeout_s)
        after = bounds._bytes_of(found) + size_bytes
        if max_bytes is not None and after > bounds.CLAIMED_SHARE * max_bytes:
            return None
        self._meta.txn((), (Put(self._keys.level, bounds._level(after)),), timeout_s)
        return Claim(size_bytes, found.create_revision)

    real = Bounds.claim
    with patch.object(Bounds, "claim", claim):
        yield


@bug("host_claims")
def claims_without_end() -> Iterator[None]:
    """A claim may raise the level above the bound."""
    with patch.object(bounds, "CLAIMED_SHARE", 2.0):
        yield


@bug("host_claims")
def claims_too_little() -> Iterator[None]:
    """A claim lacks the put that it is for."""

    def claim(self: Claims, lacking_bytes: int) -> int | None:
        return real(self, 0)

    real = Claims._claim
    with patch.object(Claims, "_claim", claim):
        yield


@bug("host_lent")
def lends_free() -> Iterator[None]:
    """A node without a session writes on and on, and claims nothing of that later."""

    def lend(self: Claims, lacking_bytes: int, left_bytes: int) -> int | None:
        lent_bytes, self._owed_bytes = real(self, lacking_bytes, left_bytes), 0
        return lent_bytes

    real = Claims._moment
    with patch.object(Claims, "_moment", lend):
        yield


@bug("host_claims")
def settles_all() -> Iterator[None]:
    """A node that ends gives back all that it claimed, as if it had written nothing."""

    def settle(self: Claims, left_bytes: int) -> None:
        real(self, self._claimed_bytes)

    real = Claims.settle
    with patch.object(Claims, "settle", settle):
        yield


@bug("host_lent")
def settles_what_was_lent() -> Iterator[None]:
    """A node that ends gives back what it was lent, which is in no level."""

    def settle(self: Claims, left_bytes: int) -> None:
        self._owed_bytes = 0
        real(self, left_bytes)

    real = Claims.settle
    with patch.object(Claims, "settle", settle):
        yield


@bug("host_counted")
def begins_unknown() -> Iterator[None]:
    """A level begins at 0 on a root that has chunks."""

    def claim(self: Bounds, size_bytes: int, max_bytes: int | None, _: object, timeout_s: float | None = None) -> Any:
        return real(self, size_bytes, max_bytes, lambda: True, timeout_s)

    real = Bounds.claim
    with patch.object(Bounds, "claim", claim):
        yield


@bug("host_counted")
def begins_beside_a_word() -> Iterator[None]:
    """A level begins on an empty root though others may write what a collector's word allows."""

    def claim(
        self: Bounds,
        size_bytes: int,
        max_bytes: int | None,
        is_empty: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> Claim | None:
        with patch.object(bounds, "Absent", lambda key: Absent(self._keys.level)):
            return real(self, size_bytes, max_bytes, is_empty, timeout_s)

    real = Bounds.claim
    with patch.object(Bounds, "claim", claim):
        yield


@bug("host_large")
def puts_uncounted() -> Iterator[None]:
    """A put of more than X begins once those before it are counted: it is not counted itself."""

    def reserve(self: NodeUsage, size_bytes: int, missing_bytes: Callable[[], int] | None = None) -> Reserved:
        return real(self, min(size_bytes, 1))

    real = NodeUsage.reserve
    with patch.object(NodeUsage, "reserve", reserve):
        yield


@bug("host_counted")
def word_keeps_level() -> Iterator[None]:
    """The level from before a collector's first word is there when it is gone, and lacks all that was written since."""
    with patch.object(Bounds, "end_claims", lambda self: Delete(f"{self._keys.level}-of-nobody")):
        yield


@bug("host_counted")
def leaves_nothing_counted() -> Iterator[None]:
    """A collector that ends leaves a level of nothing but what nodes may still write."""

    def leave(self: Bounds, level_bytes: int, timeout_s: float | None = None) -> None:
        real(self, 0, timeout_s)

    real = Bounds.leave
    with patch.object(Bounds, "leave", leave):
        yield


@bug("host_counted")
def leaves_unreported() -> Iterator[None]:
    """A collector that ends soon leaves what was reported to it, though nodes have not heard its word."""
    with patch.object(RoomSign, "_claimed_bytes", lambda *_: 0):
        yield


@bug("host_counted")
def leaves_to_others() -> Iterator[None]:
    """A collector that ends leaves a level alone that a node began meanwhile."""

    def leave(self: Bounds, level_bytes: int, timeout_s: float | None = None) -> None:
        self._meta.txn((Absent(self._keys.level),), (Put(self._keys.level, bounds._level(level_bytes)),), timeout_s)

    with patch.object(Bounds, "leave", leave):
        yield
