"""A prompt to which a put adds, kept from being evicted meanwhile."""

from __future__ import annotations

from kvstore.address import Chain
from kvstore.node.chunks import Chunks
from kvstore.node.gc_state import GcState


class Guard:
    """Keeps a prompt from being evicted while a put adds to it (gc/PROTOCOL.md, section 7)."""

    def __init__(self, view: GcState, chunks: Chunks, chain: Chain, first: int) -> None:
        self._view = view
        self._chunks = chunks
        self._chain = chain
        self._first = first
        self._listings = view.listings
        self._mark = view.protect(chain.packed_addresses)
        if self._mark is not None:
            view.settle(chain)  # what was chosen before is deleted

    @property
    def renews(self) -> bool:
        """True if ``renew`` has something to do."""
        return self._mark is not None and self._first < len(self._chain)

    def renew(self) -> None:
        """Marks the parents of what was published as used, before the guard ends: a collector whose listing lacks the
        children must not take them. Those that are newer than the last listing are not in it.
        """
        chain, chunks = self._chain, self._chunks
        stop = self._first if self._view.listings == self._listings else len(chain) - 1
        for address in chain.addresses[max(0, self._first - 1) : stop]:
            name = chunks.name(address, chain.namespace.id)
            stat = chunks.root.stat(name)
            if stat is not None:
                chunks.root.touch(name, stat.mtime_ns)

    def release(self) -> None:
        """Ends it. Idempotent."""
        mark, self._mark = self._mark, None
        self._view.unprotect(mark)
