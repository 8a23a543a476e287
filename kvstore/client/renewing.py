"""Renewing the leases of a client's holds: one call to each worker that has some, for all that it has.

A thread of its own, because nobody waits for it and the caller may compute for long.  A client that is killed renews
nothing, so its workers let go of what it held (gc/PROTOCOL.md, H4).
"""

from __future__ import annotations

import logging
from typing import Any, Protocol
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from kvstore.background import Loop
from kvstore.client.endpoint import Endpoint
from kvstore.client.owner import Owner
from kvstore.sources import Clock
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.waiting import Monitor
from kvstore.wire.messages import sealed

log = logging.getLogger(__name__)

SHARE = 4
"""Renewed after this share of a lease, so that a process may stall for most of one."""
CALL_S_MAX = 5.0


class LeasedHold(Protocol):
    """A hold at a worker, as far as its lease goes. ``renewed_s`` is written by the renewing thread alone."""

    id: bytes
    lease_s: float
    endpoint: Endpoint
    renewed_s: float
    """When the renewal that was acknowledged last was sent, by the monotonic clock."""
    ended: bool
    """Set once the worker says that it has ended."""


class Renewing:
    """The live holds of one client, and the thread that renews them, made with the first. Thread-safe.

    It keeps none of them alive: one that its owner forgot is not renewed, and so ends.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = Monitor()
        self._live: WeakSet[LeasedHold] = WeakSet()
        self._loop = Loop("kvstore-renewing", self._changed, lambda: self._turn)
        self._owner = Owner()

    def add(self, hold: LeasedHold) -> None:
        """Renews it from now on."""
        with self._changed:
            self._live.add(hold)
            if not self._loop.threads:
                self._loop.start()
            self._changed.notify_all()

    def remove(self, hold: LeasedHold) -> None:
        """Renews it no more. Idempotent. In a forked child nothing: thread and lock are its parent's."""
        if not self._owner.is_here:
            return
        with self._changed:
            self._live.discard(hold)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._loop.close(CALL_S_MAX)

    def step(self) -> float | None:
        """Renews what is due; seconds until something is, None where nothing is held."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            live = list(self._live)
        due = [hold for hold in live if hold.renewed_s + hold.lease_s / SHARE <= now_s]
        asked: list[tuple[list[LeasedHold], Any]] = []
        for endpoint in {hold.endpoint for hold in due}:
            # All that this worker has, also those that are not due: they need no call of their own soon.
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
            for hold in holds:  # again in half of that time
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
