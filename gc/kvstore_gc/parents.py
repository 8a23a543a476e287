"""Chunks without their parent, which a collector that was killed between two sweeps may leave.

No reader finds them, because a prompt ends at the first missing chunk. A listing does not name parents, headers do: so
only the chunks that would be evicted next are read. What such a collector left is among them, because everything below
their rank was deleted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvstore.address import NO_PARENT, Address
from kvstore.census.walk import read_fixed
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES
from kvstore.namespace import NamespaceId
from kvstore.recency import NS_PER_S
from kvstore_gc.policy import Uses
from kvstore_gc.ranking import Ranking, id_of
from kvstore_gc.site import Site

CHECKED_MAX = 4_096
"""Chunks checked in one listing. Their parents are remembered until the next one, so each header is read once."""


class _Chunk(NamedTuple):
    at: int
    """Its place among those that are checked."""
    address: Address
    namespace: NamespaceId


class Parents:
    """The parents of the chunks of one root that are evicted next. One thread."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._parents: dict[Address, Address] = {}

    def check(self, ranking: Ranking) -> None:
        """Makes the chunks due that have no parent, among those that are evicted next, and the chunks behind them."""
        rows = ranking.front(CHECKED_MAX)
        behind, traits = np.ones(len(rows), np.bool_), self._site.root.traits
        if traits.touch:  # else times do not tell the depth
            behind = Uses.of(rows["mtime_ns"], ranking.goals.quantum_s).depth > 0
        if not traits.ordered_publish:  # a put may be about to publish the parent
            behind &= rows["mtime_ns"] < (self._site.clock.now_s() - self._site.timings.put_s_max) * NS_PER_S
        columns = np.flatnonzero(behind).tolist(), *(rows[name][behind].tolist() for name in ("address", "namespace"))
        chunks = [_Chunk(at, Address(address), id_of(number)) for at, address, number in zip(*columns, strict=True)]
        self._read(chunks)
        chunks = [chunk for chunk in chunks if self._parents.get(chunk.address, NO_PARENT) != NO_PARENT]
        if not chunks:
            return
        listed = ranking.have([self._parents[chunk.address] for chunk in chunks])
        unlisted = [chunks[at] for at in np.flatnonzero(~listed)]
        lost: list[_Chunk] = []
        self._site.each(len(unlisted), lambda at: lost.append(unlisted[at]) if self._is_lost(unlisted[at]) else None)
        children: dict[Address, list[_Chunk]] = {}
        for chunk in chunks:
            children.setdefault(self._parents[chunk.address], []).append(chunk)
        orphans = np.zeros(len(rows), np.bool_)
        while lost:
            orphans[lost[-1].at] = True
            lost += children.get(lost.pop().address, ())
        if orphans.any():
            ranking.orphaned(orphans)

    def _read(self, chunks: list[_Chunk]) -> None:
        """Reads the headers of chunks that were not read before, as far as they can be read."""
        self._parents = {one.address: self._parents[one.address] for one in chunks if one.address in self._parents}
        new = [chunk for chunk in chunks if chunk.address not in self._parents]

        def look(number: int) -> None:
            with suppress(KVStoreError):
                seen = self._site.root.look(self._name(new[number].address, new[number].namespace), FIXED_BYTES)
                header = read_fixed(seen.prefix) if seen is not None else None
                if header is not None:
                    self._parents[new[number].address] = header.parent

        self._site.each(len(new), look)

    def _is_lost(self, chunk: _Chunk) -> bool:
        """True if its parent does not exist now: the listing may lack it, or not be of its shard."""
        try:
            return self._site.root.stat(self._name(self._parents[chunk.address], chunk.namespace)) is None
        except KVStoreError:
            return False

    def _name(self, address: Address, namespace: NamespaceId) -> places.Name:
        return places.chunk(address, namespace, self._site.identity.shard_bits)
