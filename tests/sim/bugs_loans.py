"""Bugs of the loans on one host, which take the place of claims where the metadata cannot be relied on (rule S8)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

from kvstore.meta.sqlite import loans
from kvstore.meta.sqlite.loans import Loans
from kvstore.node.claims import FREE_LOANS, Claims

from kvstore.meta.bounds import CLAIMED_SHARE, Bounds
from kvstore_gc.capacity import Watermarks
from tests.sim.planting import bug


@bug("host_lent")
def moment_is_free() -> Iterator[None]:
    """A node that has no session for a moment writes without a loan."""

    def moment(self: Claims, lacking_bytes: int, left_bytes: int) -> int | None:
        with patch.object(self, "_loans", FREE_LOANS):
            return real(self, lacking_bytes, left_bytes)

    real = Claims._moment
    with patch.object(Claims, "_moment", moment):
        yield


@bug("host_lent")
def level_outlives_loans() -> Iterator[None]:
    """Who claims forgets no level, though it lacks what was lent."""
    with patch.object(Bounds, "forget", lambda self, timeout_s=None: None):
        yield


@bug("host_lost")
def lends_the_bound() -> Iterator[None]:
    """Loans end at the bound itself, as if nobody could still write what he had claimed before."""
    with patch.object(loans, "BEFORE_SHARE", CLAIMED_SHARE - 1.0):
        yield


@bug("host_lost")
def lends_by_an_old_boot() -> Iterator[None]:
    """A level is believed that another boot counted."""

    def read(file: int) -> loans._Level | None:
        level = real(file)
        return None if level is None else level._replace(boot=boots[0])

    def lend(self: Loans, file: int, size_bytes: int, more_bytes: int) -> int | None:
        boots[0] = self._boot
        return real_lend(self, file, size_bytes, more_bytes)

    boots, real, real_lend = [""], loans._read, Loans._lend
    with patch.object(loans, "_read", read), patch.object(Loans, "_lend", lend):
        yield


@bug("host_lost")
def counts_before_the_lock() -> Iterator[None]:
    """Where no level is there, what the files take is read before the lock is taken."""

    def lend(self: Loans, size_bytes: int, more_bytes: int) -> int | None:
        seen.pop(self, None)
        if not os.path.exists(self._path):
            seen[self] = loans._Level(self._boot, self._clock.monotonic_s(), self._used_bytes(), 0)
        return real(self, size_bytes, more_bytes)

    def lend_locked(self: Loans, file: int, size_bytes: int, more_bytes: int) -> int | None:
        if self in seen:
            loans._write(file, seen[self])
        return real_locked(self, file, size_bytes, more_bytes)

    seen: dict[Loans, loans._Level] = {}
    real, real_locked = Loans.lend, Loans._lend
    with patch.object(Loans, "lend", lend), patch.object(Loans, "_lend", lend_locked):
        yield


@bug("host_lost_counted")
def loans_outlive_an_adoption() -> Iterator[None]:
    """An adoption leaves the loans, and their level, to the next loss."""
    with patch("tests.sim.bounded_world.end_loans", lambda folder: None):
        yield


@bug("host_lost_counted")
def word_outlives_loans() -> Iterator[None]:
    """A collector whose lease ended goes on with what it counted before, which lacks what was lent."""
    with patch.object(Watermarks, "forget", lambda self: None):
        yield
