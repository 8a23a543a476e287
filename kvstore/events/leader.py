"""The fence: of several publishers of one name one speaks, by a leased key in etcd.

A speaker that hears nothing from etcd for its lease falls silent by its own clock before the key can go. Its numbers
begin at the revision of its key, so a subscriber tells what an earlier speaker said from what a later one says.
"""

from __future__ import annotations

import json
import logging
import os
import socket

from kvstore.errors import KVStoreError, Unavailable
from kvstore.events.limits import EventLimits
from kvstore.meta.store import Absent, LeaseGone, LeaseId, Meta, Put
from kvstore.sources import Clock, Ids

log = logging.getLogger(__name__)

AGAIN_S = 0.5
NEVER_S = float("-inf")


class Fence:
    """One publisher's part in the election. Used by one thread; ``step`` often."""

    def __init__(self, meta: Meta, key: str, limits: EventLimits, clock: Clock, ids: Ids) -> None:
        self._meta = meta
        self._key = key
        self._limits = limits
        self._clock = clock
        said = {"id": ids.fresh().hex(), "host": socket.gethostname(), "pid": os.getpid()}
        self._value = json.dumps(said).encode()
        self._lease: LeaseId | None = None
        self._heard_s = NEVER_S
        self._due_s = NEVER_S
        self._term = 0
        self._fails = False
        self._is_silent = False
        """True once it has said so: its lease is over by its own clock."""

    @property
    def term(self) -> int:
        """The revision at which this publisher was elected; 0 if it is not the speaker now."""
        speaks = self._term and self._clock.monotonic_s() < self._heard_s + self._limits.lease_s
        return self._term if speaks else 0

    def step(self) -> None:
        """Stands for election, or renews the lease, when it is time to. Raises nothing."""
        sent_s = self._clock.monotonic_s()
        if sent_s < self._due_s:
            return
        self._due_s = sent_s + (self._limits.lease_s / 5 if self._term else AGAIN_S)
        try:
            if self._term:
                self._renew(sent_s)
            else:
                self._stand(sent_s)
            self._fails = False
        except KVStoreError as error:
            log.log(logging.DEBUG if self._fails else logging.INFO, "events.fence %s", error)
            self._fails = True
        if self._term and not self.term and not self._is_silent:
            log.warning("events.silent the lease is over, as far as this publisher knows")
        self._is_silent = bool(self._term and not self.term)

    def close(self) -> None:
        """Has another publisher speak at once. Idempotent."""
        lease, self._lease, self._term = self._lease, None, 0
        if lease is not None:
            try:
                self._meta.revoke(lease, self._limits.meta_deadline_s)
            except KVStoreError as error:
                log.info("events.fence %s", error)  # it goes by itself

    def _renew(self, sent_s: float) -> None:
        assert self._lease is not None
        if self._meta.keep_alive(self._lease, self._timeout_s()):
            if sent_s < self._heard_s + self._limits.lease_s:
                self._heard_s = sent_s
                return
            self.close()  # it was silent for too long: another one may have spoken
        self._lease, self._term = None, 0
        if not self._is_silent:
            log.warning("events.silent the lease is over")

    def _stand(self, sent_s: float) -> None:
        found = self._meta.get(self._key, self._timeout_s())
        if found is None:
            self._lease = self._meta.grant(self._limits.lease_s, self._timeout_s())
            try:
                self._meta.txn((Absent(self._key),), (Put(self._key, self._value, self._lease),), self._timeout_s())
            except (LeaseGone, Unavailable):
                pass  # it may have landed: only the key tells
            found = self._meta.get(self._key, self._timeout_s())
        if found is not None and found.value == self._value and found.lease == self._lease:
            self._heard_s, self._term = sent_s, found.create_revision
            log.info("events.speaks term=%d", self._term)
        elif self._lease is not None:
            self.close()

    def _timeout_s(self) -> float:
        return min(self._limits.meta_deadline_s, self._limits.lease_s / 2)
