"""Renews the leases of a client's holds: one call per worker, for all holds there.

It has its own thread, because nobody waits for it and the caller may compute for long. A client that is killed renews
nothing, so its workers end its holds (gc/PROTOCOL.md, H4).
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from kvstore.background import Loop
from kvstore.client.endpoint import Endpoint
from kvstore.client.owner import Owner
from kvstore.sources import Clock
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import sealed

log = logging.getLogger(__name__)

SHARE = 4
"""A lease is renewed after 1/SHARE of its time, so that a process may stall for the rest."""
CALL_S_MAX = 5.0
RELEASE_S = 1.0
RELEASED_MAX = 1000


class LeasedHold(Protocol):
    """The lease of a hold at a worker. Only the renewing thread writes ``renewed_s``."""

    id: bytes
    lease_s: float
    endpoint: Endpoint
    renewed_s: float
    """Monotonic time at which the last acknowledged renewal was sent."""
    ended: bool
    """Set once the worker says that the hold has ended."""


class Renewing:
    """The live holds of one client, and the thread that renews them; started with the first hold. Thread-safe.

    It refers to holds weakly: one that its owner dropped is not renewed, and so ends.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._live: WeakSet[LeasedHold] = WeakSet()
        self._loop = Loop("kvstore-renewing", self._changed, lambda: self._turn)
        self._owner = Owner()

    def add(self, hold: LeasedHold) -> None:
        """Renews the hold from now on."""
        with self._changed:
            self._live.add(hold)
            if not self._loop.threads:
                self._loop.start()
            self._changed.notify_all()

    def remove(self, hold: LeasedHold) -> None:
        """Stops renewing the hold. Idempotent. Does nothing in a forked child: thread and lock belong to its parent."""
        if not self._owner.is_here:
            return
        with self._changed:
            self._live.discard(hold)

    def close(self) -> None:
        """Ends the holds, as far as their workers answer within RELEASE_S, and the thread. Idempotent."""
        if self._owner.is_here:
            with self._changed:
                live = list(self._live)
                self._live.clear()
            self._release(live)
        self._loop.close(CALL_S_MAX)

    def _release(self, live: list[LeasedHold]) -> None:
        """Releases the last RELEASED_MAX of them, all at once; the rest ends with its lease."""
        asked: list[Any] = []
        for hold in live:
            hold.ended = True
        for hold in live[-RELEASED_MAX:]:
            with suppress(ValueError):  # its channel is closed
                request = sealed(pb.ReleaseRequest(hold=hold.id))
                asked.append(hold.endpoint.unary("Release").future(request, timeout=RELEASE_S))
        for answer in asked:
            with suppress(grpc.RpcError, grpc.FutureCancelledError):
                answer.result()

    def step(self) -> float | None:
        """Renews the leases that are due; returns the seconds until the next one is, None if nothing is held."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            live = list(self._live)
        due = [hold for hold in live if hold.renewed_s + hold.lease_s / SHARE <= now_s]
        asked: list[tuple[list[LeasedHold], Any]] = []
        for endpoint in {hold.endpoint for hold in due}:
            # All holds of this worker, due or not: one call renews them together.
            holds = [hold for hold in live if hold.endpoint is endpoint]
            request = sealed(pb.RenewRequest(holds=[hold.id for hold in holds]))
            try:
                timeout_s = min(CALL_S_MAX, min(hold.lease_s for hold in holds) / SHARE)
                asked.append((holds, endpoint.unary("Renew").future(request, timeout=timeout_s)))
            except ValueError:
                for hold in holds:  # its channel was closed: the worker ends them
                    self._end(hold)
        for holds, answer in asked:
            self._hear(holds, answer, now_s)
        with self._changed:
            live = list(self._live)
        if not live:
            return None
        return max(0.0, min(hold.renewed_s + hold.lease_s / SHARE for hold in live) - self._clock.monotonic_s())

    def _hear(self, holds: list[LeasedHold], answer: Any, sent_s: float) -> None:
        try:
            ended = set(pb.RenewResponse.FromString(answer.result()).ended)
        except (grpc.RpcError, grpc.FutureCancelledError, DecodeError) as error:
            log.info("client.not_renewed worker=%s holds=%d why=%s", holds[0].endpoint.address, len(holds), error)
            for hold in holds:  # try again after half of that time
                hold.renewed_s = sent_s - hold.lease_s / SHARE / 2
            return
        for hold in holds:
            hold.renewed_s = sent_s
            if hold.id in ended:
                self._end(hold)

    def _end(self, hold: LeasedHold) -> None:
        hold.ended = True
        self.remove(hold)

    def _turn(self) -> None:
        pause_s = self.step()
        with self._changed:
            if not self._loop.closed and (pause_s is not None or not self._live):
                self._changed.wait(pause_s)
