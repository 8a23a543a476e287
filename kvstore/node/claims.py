"""The room that a node claims on a root of one host before it writes, while no collector counts (rule S6).

A claim is one small transaction for many puts. It is what makes the bound hold in a program that ends before any
collector has begun, and across such programs. Where the metadata are lost, a loan takes its place (rule S8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.errors import KVStoreError
from kvstore.meta.bounds import CLAIMED_SHARE, Bound, Bounds
from kvstore.node.claiming import Lending
from kvstore.node.usage import WAITS

log = logging.getLogger(__name__)

CLAIM_SHARE = 1 / 128
"""The share of the bound in one claim. A node that is killed loses it until the next listing."""
CLAIM_BYTES_MAX = 64 << 20
UNBOUND_BYTES = 256 << 20
"""One claim where nobody asks for a bound: a claim takes as long as an eighth of a put of 16 MiB."""
EARLY_SHARE = 1 / 16
"""A process that claimed this share of the bound needs a collector at once: it takes a moment to begin.

It may write as much, once, while it cannot rely on the metadata."""
TIMEOUT_S = 1.0
COLLECTS = (
    "this store makes room by itself within seconds: back off, and put again; if the disk stays full, see the log, and "
    "delete other files from it"
)
COLLECTS_NOT = (
    "this store collects nothing (max_bytes=None): open it with max_bytes=, or run kvstore-gc --root FOLDER --once "
    "--max-bytes SIZE"
)
"""What a put on a full disk is told."""
CLUSTERS = (
    "the root belongs to a cluster now, whose collectors do not count what this process writes: open it with etcd=, or "
    "connect to a worker"
)
UNRELIABLE = "metadata.sqlite on the root cannot be relied on (or generations.host, the root's record of it)"
NO_ROOM = (
    "so nothing is collected, and the bound leaves no room for this put: see the log, and run `kvstore fsck ROOT "
    "--adopt` if it stays (gc/RUNBOOK.md)"
)
"""What a put without room is told."""


class FreeLoans:
    """Lends whatever is asked, and the metadata are never lost: a store without a bound, and simulated ones."""

    def is_lost(self) -> bool:
        """See ``Lending``."""
        return False

    def lend(self, size_bytes: int, more_bytes: int) -> int | None:
        """See ``Lending``."""
        return more_bytes

    def are_left(self) -> bool:
        """See ``Lending``."""
        return False

    def end(self) -> None:
        """See ``Lending``."""


FREE_LOANS = FreeLoans()


class Claims:
    """The claims of one node. One thread at a time, as ``NodeUsage`` calls it."""

    def __init__(
        self,
        bounds: Bounds,
        own: Bound,
        *,
        counts: Callable[[], bool],
        is_empty: Callable[[], bool],
        is_clusters: Callable[[], bool],
        has_disk_for: Callable[[int], bool],
        wrote: Callable[[bool], None],
        loans: Lending = FREE_LOANS,
    ) -> None:
        """``counts`` says that the metadata can be relied on, ``is_empty`` that the root has no chunk yet, and
        ``is_clusters`` that a cluster has taken it over.

        ``has_disk_for`` is as in ``Claiming``. ``wrote`` is called before the first put, and, with True, when a
        collector is needed at once.
        """
        self._bounds = bounds
        self._own = own
        self._counts = counts
        self._is_empty = is_empty
        self._is_clusters = is_clusters
        self._has_disk_for = has_disk_for
        self._wrote = wrote
        self._loans = loans
        self._made_at = 0
        self._claimed_bytes = 0
        """Claimed from the level key that was made at ``_made_at``."""
        self._owed_bytes = 0
        """Lent without a claim, because the metadata could not be relied on: the next claim has it too."""
        self._has_loan = False
        """All that it owes, and had left before, is part of its loans."""
        self._has_claimed = False
        self._failure = ""
        """Why the last claim failed. Text: an error's traceback would keep the caller's memory."""

    def begin(self) -> None:
        """See ``NodeUsage``."""
        self._wrote(False)

    def claim(self, lacking_bytes: int, left_bytes: int) -> int | None:
        """See ``NodeUsage``."""
        if not self._counts():
            if self._is_lost():
                return self._borrow(lacking_bytes, _claim_bytes(self._own.max_bytes), left_bytes)
            return self._moment(lacking_bytes, left_bytes)
        try:
            claimed_bytes = self._claim(lacking_bytes)
            self._failure = ""
            return claimed_bytes
        except KVStoreError as error:
            log.debug("claims.failed %s", error)
            self._failure = str(error)
            self._wrote(True)  # perhaps the disk has no room for metadata: a collector makes some
            return None

    def borrow(self, lacking_bytes: int, left_bytes: int) -> int | None:
        """See ``NodeUsage``."""
        if self._is_lost():
            return self._borrow(lacking_bytes, _claim_bytes(self._own.max_bytes), left_bytes)
        return None

    def has_disk_for(self, size_bytes: int) -> bool:
        """See ``NodeUsage``."""
        return self._has_disk_for(size_bytes)

    def refusal(self) -> str:
        """See ``NodeUsage``."""
        if self._is_clusters():
            return CLUSTERS
        if not self._counts():
            return f"{UNRELIABLE}, {self._failure or NO_ROOM}"
        return f"nobody knows how much may be written: {self._failure}" if self._failure else WAITS

    def full(self) -> str:
        """See ``NodeUsage``."""
        self._wrote(True)
        return COLLECTS if self._own else COLLECTS_NOT

    def settle(self, left_bytes: int) -> None:
        """See ``NodeUsage``. What cannot be given back counts until the next listing."""
        try:
            # What was lent is in no level: it cannot be given back, and what was written of it is owed.
            back_bytes = min(left_bytes - self._owed_bytes, self._claimed_bytes)
            if back_bytes:
                self._bounds.settle(back_bytes, self._made_at, TIMEOUT_S)
        except KVStoreError as error:
            log.debug("claims.left %s", error)

    def _is_lost(self) -> bool:
        try:
            return self._loans.is_lost()
        except KVStoreError as error:
            log.debug("claims.nobody_can_tell %s", error)
            return False

    def _borrow(self, lacking_bytes: int, more_bytes: int, left_bytes: int) -> int | None:
        """Borrows both, or what is lacking alone; returns how many more."""
        unknown_bytes = 0 if self._has_loan else self._owed_bytes + left_bytes
        try:
            lent_bytes = self._loans.lend(unknown_bytes + lacking_bytes, more_bytes)
            self._failure = ""
        except KVStoreError as error:
            log.debug("claims.no_loan %s", error)
            self._failure = f"and nothing can be lent of the bound: {error}"
            return None
        if lent_bytes is not None:
            self._owed_bytes, self._has_loan = self._owed_bytes + lacking_bytes + lent_bytes, True
        return lent_bytes

    def _moment(self, lacking_bytes: int, left_bytes: int) -> int | None:
        """Borrows what may be written for a moment, while a session is renewed; without a bound for ever.

        Not for longer, nor for program after program: others go on to claim, and the loans know nothing of that.
        """
        if self._own.max_bytes is None:
            return self._borrow(lacking_bytes, CLAIM_BYTES_MAX, left_bytes)
        moment_bytes = min(CLAIM_BYTES_MAX, int(EARLY_SHARE * self._own.max_bytes))
        if self._owed_bytes or not self._has_claimed or moment_bytes < lacking_bytes:
            return None
        return self._borrow(lacking_bytes, moment_bytes - lacking_bytes, left_bytes)

    def _claim(self, lacking_bytes: int) -> int | None:
        if self._loans.are_left():  # somebody could not rely on the metadata for a moment, or until they came back
            self._bounds.forget(TIMEOUT_S)
            self._loans.end()
        max_bytes = self._bounds.smallest(TIMEOUT_S).and_of(self._own).max_bytes
        size_bytes = _claim_bytes(max_bytes)
        asked_bytes = size_bytes + lacking_bytes + self._owed_bytes
        claim = self._bounds.claim(asked_bytes, max_bytes, self._is_empty, TIMEOUT_S)
        if claim is None and max_bytes is not None:  # perhaps there is room for this put, and for no other
            size_bytes, asked_bytes = 0, asked_bytes - size_bytes
            claim = self._bounds.claim(asked_bytes, max_bytes, self._is_empty, TIMEOUT_S)
        if claim is None and max_bytes is None:
            return CLAIM_BYTES_MAX  # nobody knows the level, and nobody asks for a bound
        if claim is None:
            self._wrote(True)
            log.debug("claims.refused: a collector has to count, or %g of the bound is claimed", CLAIMED_SHARE)
            return None
        if claim.made_at != self._made_at:
            self._made_at, self._claimed_bytes = claim.made_at, 0
        self._claimed_bytes += claim.size_bytes
        self._owed_bytes, self._has_loan, self._has_claimed = 0, False, True
        if max_bytes is not None and self._claimed_bytes > EARLY_SHARE * max_bytes:
            self._wrote(True)
        return size_bytes


def _claim_bytes(max_bytes: int | None) -> int:
    """The bytes of a claim beyond those of a put."""
    return UNBOUND_BYTES if max_bytes is None else max(1, min(CLAIM_BYTES_MAX, int(CLAIM_SHARE * max_bytes)))
