"""A prompt to which a put adds, kept from being evicted meanwhile."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.node.chunks import Chunks
from kvstore.node.gc_state import GcState


class Guard:
    """Keeps a prompt from being evicted while a put adds to it (gc/PROTOCOL.md, section 7)."""

    def __init__(self, view: GcState, chunks: Chunks, chain: Chain) -> None:
        self._view = view
        self._chunks = chunks
        self._chain = chain
        self._listings = view.listings
        self._mark = view.protect(chain.packed_addresses)
        if self._mark is not None:
            view.settle(chain)  # what was chosen before is deleted

    @property
    def is_live(self) -> bool:
        """True until it ends, if it protects."""
        return self._mark is not None

    def renew(self, fresh: npt.NDArray[np.bool_]) -> None:
        """Marks the parents of chunks that this put published as used, before the guard ends: a collector whose listing
        lacks the children must not take them. Parents that are newer than the last listing are not in it.
        """
        chain, chunks = self._chain, self._chunks
        parents = fresh[1:].copy()
        if self._view.listings == self._listings:
            parents &= ~fresh[:-1]
        for at in np.flatnonzero(parents).tolist():
            name = chunks.name(chain.addresses[at], chain.namespace.id)
            stat = chunks.root.stat(name)
            if stat is not None:
                chunks.root.touch(name, stat.mtime_ns)

    def release(self) -> None:
        """Ends it. Idempotent."""
        mark, self._mark = self._mark, None
        self._view.unprotect(mark)
