"""A prompt to which a put adds, kept from being evicted meanwhile."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.node.chunks import Chunks
from kvstore.node.gc_state import GcState
from kvstore.root.posix import PosixRoot

Mask = npt.NDArray[np.bool_]


class Guard:
    """Keeps a prompt from being evicted while a put adds to it (gc/PROTOCOL.md, section 7)."""

    def __init__(self, view: GcState, chunks: Chunks, chain: Chain) -> None:
        self._view = view
        self._chunks = chunks
        self._chain = chain
        self._listings = view.listings
        self._mark = view.protect(chain.packed_addresses)
        self.is_settled = self._mark is None or view.settle(chain)
        """False if some of the prompt is still being deleted, by somebody who was stopped in the middle of it."""

    def unlisted(self, fresh: Mask) -> list[int]:
        """Returns the parents of what was published (``fresh``) that a listing may have without their children.

        Those that this put published as well are newer than the last listing, unless another one has begun.
        """
        if self._mark is None:
            return []
        is_listed = self._view.listings != self._listings
        published: list[int] = np.flatnonzero(fresh).tolist()
        return [index - 1 for index in published if index and (is_listed or not fresh[index - 1])]

    def renew(self, index: int) -> None:
        """Marks a parent as used, before the guard ends: or a collector whose listing lacks the child would take it."""
        name = self._chunks.name(self._chain.addresses[index], self._chain.namespace.id)
        assert isinstance(self._chunks.root, PosixRoot)
        self._chunks.root.mark(name)

    def release(self) -> None:
        """Ends it. Idempotent."""
        mark, self._mark = self._mark, None
        self._view.unprotect(mark)
