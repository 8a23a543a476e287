"""The reports of all peers: a sorted array that never changes, so that look-ups need no lock while a thread
builds the next.

One number for each print of each peer: shard (6 bits), print (32 bits) and peer (16 bits), the most significant first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.address import Address
from kvstore.peers.digest import Spots, spots_of

PEER_BITS = 16
PEERS_MAX = (1 << PEER_BITS) - 1
STEP_FIRST = 64
"""Chunks that are looked up first: most prompts end there, and the rest need no look-up."""
STEP = 4096
_PEER_BITS = np.uint64(PEER_BITS)
_PEER = np.uint64(PEERS_MAX)

Entries = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Directory:
    """Immutable. ``addresses`` maps each peer's number to the address where it serves."""

    entries: Entries
    addresses: Mapping[int, str]
    numbers: Mapping[str, int]

    def leading(self, chunks: Sequence[Address], first: int, aside: Collection[str] = ()) -> int:
        """Returns how many consecutive chunks from ``first`` on are reported by some peer that is not ``aside``."""
        if not len(self.entries):
            return 0
        without = np.array([self.numbers[each] for each in aside if each in self.numbers], np.uint64)
        at, step = first, STEP_FIRST
        while at < len(chunks):
            spots = spots_of(chunks[at : at + step])
            said = self._any_but(without, *self._spans(spots)) if len(without) else self._any(spots)
            if not said.all():
                return at + int(said.argmin()) - first
            at, step = at + step, STEP
        return len(chunks) - first

    def coverage(self, chunks: Sequence[Address]) -> dict[str, int]:
        """Returns the peers that report the first of ``chunks``, each with how many leading chunks it reports."""
        if not chunks or not self._any(spots_of(chunks[:1])).all():
            return {}
        starts, stops = self._spans(spots_of(chunks))
        covered: dict[int, int] = {}
        left: set[int] = set()
        for at, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            here = {int(entry & _PEER) for entry in self.entries[start:stop]}
            left = left & here if at else here
            if not left:
                break
            covered.update(dict.fromkeys(left, at + 1))
        return {self.addresses[number]: count for number, count in covered.items()}

    def _spans(self, spots: Spots) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Returns where the entries of each spot begin and end."""
        starts = np.searchsorted(self.entries, spots << _PEER_BITS)
        return starts, np.searchsorted(self.entries, (spots << _PEER_BITS) + _PEER, "right")

    def _any(self, spots: Spots) -> npt.NDArray[np.bool_]:
        """Returns for each spot whether it has a peer. Looks them up in order, so that most entries are cached."""
        if not len(self.entries):
            return np.zeros(len(spots), np.bool_)
        order = np.argsort(spots)
        ordered = spots[order]
        starts = np.searchsorted(self.entries, ordered << _PEER_BITS)
        found = np.empty(len(spots), np.bool_)
        found[order] = self.entries.take(starts, mode="clip") >> _PEER_BITS == ordered
        return found

    def _any_but(
        self, without: Entries, starts: npt.NDArray[np.intp], stops: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.bool_]:
        """Returns for each span whether it has a peer that is not among ``without``."""
        found = np.zeros(len(starts), np.bool_)
        for offset in range(int((stops - starts).max())):
            ats = starts + offset
            open_ = np.flatnonzero(~found & (ats < stops))
            if not len(open_):
                break
            found[open_] = ~np.isin(self.entries[ats[open_]] & _PEER, without)
        return found


EMPTY = Directory(np.zeros(0, np.uint64), {}, {})
