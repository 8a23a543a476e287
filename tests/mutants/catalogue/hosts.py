"""Processes of one host that break the order of their steps (gc/PROTOCOL.md, section 7)."""

from __future__ import annotations

from typing import Any

from tests.mutants.catalogue.interfaces import KNOWN, at, giving
from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import several

SHARED = "kvstore.host.tables:Shared"
VIEW = "kvstore.engine.gc_state:HostGcState"
GC_STATE = "kvstore.engine.gc_state:GcState"
PRINTS = "kvstore.host.pins:PinnedPrints"

_held: dict[int, tuple[Any, bytes]] = {}


def _protect_later(real: Any, self: Any, packed: bytes) -> Any:
    _held[id(self)] = (real, packed)


def _leading_first(real: Any, self: Any, wanted: Any) -> Any:
    found = real(self, wanted)
    protect, packed = _held.pop(id(self), (None, b""))
    if protect is not None:
        protect(self, packed)
    return found


def _unlimited(real: Any, self: Any, *asked: Any) -> Any:
    from kvstore.host.tables import Number

    shared = self._shared
    limit, shared[Number.LIMIT] = shared[Number.LIMIT], 0
    try:
        return real(self, *asked)
    finally:
        shared[Number.LIMIT] = limit


_appended: list[tuple[Any, Any, bytes]] = []


def _append_later(real: Any, self: Any, packed: bytes) -> Any:
    _appended.append((real, self, packed))


def _append_after_pins(real: Any, self: Any) -> Any:
    found = real(self)
    while _appended:
        append, log, packed = _appended.pop()
        append(log, packed)
    return found


_pins: dict[int, Any] = {}


def _pins_of_before(real: Any, self: Any) -> Any:
    new = real(self)
    before, _pins[id(self)] = _pins.get(id(self), new), new
    return before


def _nothing(real: Any, *_: Any, **__: Any) -> Any:
    from contextlib import nullcontext

    return nullcontext()


MUTANTS: list[Mutant] = [
    mutant(
        "host-log-before-table",
        several(at(VIEW, "protect", _protect_later), at(GC_STATE, "leading", _leading_first)),
        "host/test_eviction.py",
    ),
    mutant(
        "host-tables-before-append",
        several(at(SHARED, "append", _append_later), at(PRINTS, "read", _append_after_pins)),
        "host/test_eviction.py",
    ),
    mutant("host-pins-before-tables", at(PRINTS, "read", _pins_of_before), "host/test_eviction.py"),
    mutant(
        "host-unsettled-is-there",
        at(GC_STATE, "leading", lambda real, self, wanted: (real(self, wanted), len(wanted))[1]),
        "host/test_eviction.py host/test_view.py",
    ),
    mutant(
        "host-take-over-leaves-the-batch", at("kvstore.host.eviction", "settled", _nothing), "host/test_eviction.py"
    ),
    mutant(
        "host-parents-first",
        at("kvstore_gc.rank:Ranking", "take", lambda real, self, *rest: real(self, *rest)[::-1]),
        "host/test_eviction.py",
    ),
    mutant(
        "host-put-renews-no-parent", at("kvstore.engine.writer:PutGuard", "renew", giving(None)), "host/test_clears.py"
    ),
    mutant("host-log-forgets-nothing", at(KNOWN, "forget_each", giving(None)), "host/test_view.py"),
    mutant("host-overrun-forgets-nothing", at(KNOWN, "clear", giving(None)), "host/test_view.py"),
    mutant(
        "host-table-outlives-its-process",
        at("kvstore.host.tables:HoldTable", "forget", giving(None)),
        "host/test_tables.py",
    ),
    mutant("host-no-limit", at("kvstore.host.tables:HostRoom", "reserve", _unlimited), "host/test_room.py"),
    mutant(
        "host-dropped-room-stays-taken",
        at("kvstore.host.tables:SpaceReservation", "release", giving(None)),
        "host/test_room.py",
    ),
    mutant(
        "host-first-limit-counts",
        at("kvstore.host.tables", "smallest", lambda real, tables, *own: real([], *own)),
        "host/test_collector.py",
    ),
]
