"""This node's experience with its peers: which are left alone, and which one is asked next (P3)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from random import Random
from typing import Any

from kvstore.client.failover import Endpoint, why_unwell
from kvstore.client.limits import ClientLimits
from kvstore.client.pool import PLAIN, Bulk, Credentials
from kvstore.core.clock import Clock
from kvstore.peers.limits import PeerLimits

log = logging.getLogger(__name__)


class Peer:
    """One peer. Its fields belong to the roster, under its lock; its callers use ``endpoint`` and ``turn``."""

    def __init__(self, address: str, limits: PeerLimits, credentials: Credentials = PLAIN) -> None:
        self.address = address
        # A connection is made in three steps, each of at most ``probe_s``.
        client_limits = ClientLimits(bulk_links_max=limits.links_max, probe_s=limits.answer_s / 3)
        self.endpoint = Endpoint(address, Bulk.TCP, client_limits, credentials)
        self.turn = threading.BoundedSemaphore(limits.links_max)
        """One turn for each possible connection."""
        self.asked = 0
        """Fetches in progress or waiting."""
        self.failures = 0
        """Failures in a row."""
        self.until_s: float | None = None
        """Until when it is set aside; then it is asked for its health. None: it may be read from."""
        self.probe: Any = None


class PeerSelector:
    """All peers that were ever chosen and are still there. Thread-safe."""

    def __init__(self, limits: PeerLimits, clock: Clock, chance: Random, credentials: Credentials = PLAIN) -> None:
        self.aside: frozenset[str] = frozenset()
        """Addresses of the peers that are left alone at the moment."""
        self._limits = limits
        self._clock = clock
        self._chance = chance
        self._credentials = credentials
        self._lock = threading.Lock()  # guards the peers and their records
        self._peers: dict[str, Peer] = {}
        self._closed = False

    def choose(self, covered: Mapping[str, int], without: Collection[str]) -> Peer | None:
        """Chooses among the peers that cover most: draws two, and takes the one that is asked less at the moment.

        ``covered`` says how many of the wanted chunks each address has. The caller must ``leave`` the returned peer.
        """
        with self._lock:
            free = {each: n for each, n in covered.items() if each not in self.aside and each not in without}
            if not free or self._closed:
                return None
            most = max(free.values())
            able = [self._peer(each) for each, count in free.items() if 2 * count > most]
            drawn = self._chance.choices(able, k=2)
            chosen = min(drawn, key=lambda peer: peer.asked)
            chosen.asked += 1
            chosen.endpoint.use()
            return chosen

    def leave(self, peer: Peer) -> None:
        """Ends what ``choose`` began."""
        with self._lock:
            peer.asked -= 1
        peer.endpoint.leave()

    def praise(self, peer: Peer) -> None:
        """Notes that it gave what it was asked for."""
        with self._lock:
            peer.failures = 0

    def blame(self, address: str, why: str) -> None:
        """Leaves it alone for a while, because it failed or gave a wrong chunk."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                return
            peer.failures += 1
            pause_s = min(self._limits.aside_s_min * 2 ** min(peer.failures - 1, 16), self._limits.aside_s_max)
            peer.until_s = self._clock.monotonic_s() + pause_s
            self.aside |= {address}
        log.info("peers.aside peer=%s why=%s", address, why)

    def look_after(self, listed: Collection[str]) -> None:
        """Forgets peers that are not ``listed`` any more, and asks those that were set aside for long enough for their
        health.

        Does not wait for the peers: the next call looks at the answers.
        """
        with self._lock:
            # Not those that are being read from: ``close`` has to find them.
            version = self._credentials.connection_version
            gone = [
                peer
                for address, peer in self._peers.items()
                if not peer.asked and (address not in listed or peer.endpoint.connection_version != version)
            ]
            for peer in gone:
                del self._peers[peer.address]
            for peer in self._peers.values():
                self._look_at(peer)
            self.aside = frozenset(peer.address for peer in self._peers.values() if peer.until_s is not None)
        for peer in gone:
            peer.endpoint.retire()

    def close(self) -> None:
        """Closes all connections; running fetches end. Idempotent."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.endpoint.close()

    def _peer(self, address: str) -> Peer:
        found = self._peers.get(address)
        if found is None:
            found = self._peers[address] = Peer(address, self._limits, self._credentials)
        return found

    def _look_at(self, peer: Peer) -> None:
        if peer.until_s is None or self._clock.monotonic_s() < peer.until_s:
            return
        if peer.probe is None:
            peer.probe = peer.endpoint.probe(self._limits.answer_s)
        elif peer.probe.done():
            answer, peer.probe = peer.probe, None
            if why_unwell(answer) is None:
                peer.until_s = None
                log.info("peers.back peer=%s", peer.address)
            else:
                peer.until_s = self._clock.monotonic_s() + self._limits.aside_s_min
