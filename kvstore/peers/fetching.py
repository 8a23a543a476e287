"""One fetch: chooses which peer to ask for which run of chunks, and continues after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.address import Chain
from kvstore.node.lanes import Deadline
from kvstore.peers.asking import Answer, ask
from kvstore.peers.directory import Directory
from kvstore.peers.limits import PeerLimits
from kvstore.peers.roster import Peer, Roster


class Fetch:
    """Reads runs of one chain, one after the other, until ``ends``."""

    def __init__(self, directory: Directory, roster: Roster, limits: PeerLimits, chain: Chain, ends: Deadline) -> None:
        self.failures = 0
        """Number of peers that failed."""
        self._directory = directory
        self._roster = roster
        self._limits = limits
        self._chain = chain
        self._ends = ends
        self._tries_left = limits.tries_max
        self._passed: set[str] = set()

    def run(self, first: int, images: Sequence[memoryview]) -> Iterator[tuple[int, str]]:
        """Fills ``images`` with the chunks from index ``first`` on; yields the position and the peer of each."""
        at = 0
        while at < len(images) and self._tries_left and not self._ends.passed:
            start = first + at
            covered = self._directory.coverage(self._chain.addresses[start : first + len(images)])
            peer = self._roster.choose(covered, self._passed)
            if peer is None:
                # No peer has this chunk, or none that answers: behind the chunks that those peers report, others may
                # have more.
                at += max(covered.values(), default=1)
                continue
            wanted = images[at : at + covered[peer.address]]
            answer = self._ask(peer, start, wanted)
            for each in range(at, at + answer.count):
                yield each, peer.address
            at += answer.count
            if answer.count < len(wanted):
                self._passed.add(peer.address)
                self._tries_left -= 1

    def _ask(self, peer: Peer, first: int, images: Sequence[memoryview]) -> Answer:
        try:
            if not peer.turn.acquire(timeout=min(self._limits.answer_s, self._ends.left_s())):
                return Answer(0)  # busy with other fetches of this node
            try:
                if peer.address in self._roster.aside:
                    return Answer(0)  # it failed while this one waited
                left_s = self._ends.left_s()
                if not left_s:
                    return Answer(0)
                idle_s = min(self._limits.answer_s, left_s)
                answer = ask(peer.endpoint, self._chain, first, images, idle_s, left_s)
            finally:
                peer.turn.release()
            if answer.trouble is None:
                self._roster.praise(peer, sum(map(len, images[: answer.count])), answer.took_s)
            else:
                self.failures += 1
                self._roster.blame(peer.address, answer.trouble)
            return answer
        finally:
            self._roster.leave(peer)


def runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields where each run of consecutive indexes begins and ends in ``indexes``."""
    start = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield start, at
            start = at
