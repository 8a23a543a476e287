"""Bugs of pins: taking them (P1 to P3), and sparing those that etcd has forgotten (C5)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvstore.errors import RootMismatch, Unavailable
from kvstore.keyset import ChunkKeys
from kvstore.meta.pins import PinRecord as Ref
from kvstore.meta.pins import Pins
from kvstore.meta.session import Session
from kvstore.meta.store import LeaseGone, Put
from kvstore.node import holds, member
from kvstore.results import PinRecord
from kvstore.root.fences import list_twins, read_twin
from kvstore_gc import grace
from tests.sim import world
from tests.sim.planting import bug


@bug("zombie")
def pin_without_hold() -> Iterator[None]:
    """P1: nothing is held while the pin is being put."""

    def pin(self: member.Member, chain: ChunkKeys, ttl_s: float, owner: str) -> PinRecord:
        at = self.node
        found = chain.leading(at.writer.present_leading(chain))
        if not found.addresses:
            return member._no_pin(owner, chain.namespace, at.clock.now_s())
        tokens = len(found) * chain.namespace.layout.chunk_tokens
        ref = self._pins.pin(owner, found.addresses, round(ttl_s), tokens, chain.namespace.digest)
        return PinRecord(member._pin_id(ref), owner, chain.namespace.name, tokens, at.clock.now_s() + ttl_s)

    with patch.object(member.Member, "pin", pin):
        yield


@bug("zombie")
def pin_outlives_hold() -> Iterator[None]:
    """P1: nobody looks whether the hold has lived until the pin was acknowledged."""
    real_pin, real_check = member.Member.pin, holds.Holds.check
    pinning: list[object] = []

    def pin(self: member.Member, *rest: Any, **named: Any) -> PinRecord:
        pinning.append(self.node.holds)
        try:
            return real_pin(self, *rest, **named)
        finally:
            pinning.remove(self.node.holds)

    def check(self: holds.Holds, hold: holds.Hold) -> None:
        if self not in pinning:
            real_check(self, hold)

    with patch.object(member.Member, "pin", pin), patch.object(holds.Holds, "check", check):
        yield


@bug("zombie")
def pin_no_session() -> Iterator[None]:
    """P2: the put of a pin does not need the session's key."""

    def put(self: Pins, session: Session, record: Ref, deadline: Any) -> Ref:
        lease = self._meta.grant(record.ttl_s, deadline.left_s(0.4))
        key = self._keys.ref(record.owner, record.id)
        try:
            done = self._meta.txn((), (Put(key, record.to_bytes(), lease),), deadline.left_s())
        except LeaseGone as gone:
            raise Unavailable("the lease of the pin ended") from gone
        return replace(record, lease=lease, revision=done.revision)

    with patch.object(Pins, "_put", put):
        yield


@contextmanager
def _without_twins() -> Iterator[None]:
    """No twin is spared, and etcd loses nothing, so that nothing follows from that alone."""
    with (
        patch.object(grace.Grace, "_twins", lambda self: []),
        patch.object(world.World, "_restore", lambda self: False),
    ):
        yield


@bug("pinned")
def pin_without_proof() -> Iterator[None]:
    """P3: a pin whose reply was lost counts as put. Its twin would save it, so twins are not spared."""

    def put(self: Pins, session: Session, record: Ref, deadline: Any) -> Ref:
        try:
            return real(self, session, record, deadline)
        except Unavailable:
            return record

    real = Pins._put
    with _without_twins(), patch.object(Pins, "_put", put):
        yield


@bug("repinned")
def no_twins() -> Iterator[None]:
    """C5: pins that a restored etcd has lost are not spared."""
    with patch.object(grace.Grace, "_twins", lambda self: []):
        yield


@bug("repinned")
def twin_unreadable() -> Iterator[None]:
    """C5: a twin that cannot be read is left out."""

    def twins(self: grace.Grace) -> list[bytes]:
        found = []
        for name in list_twins(self._root):
            content = read_twin(self._root, name)
            if content is not None:
                try:
                    found.append(Ref.from_bytes(content, name).packed)
                except RootMismatch:
                    continue
        return found

    with patch.object(grace.Grace, "_twins", twins):
        yield
