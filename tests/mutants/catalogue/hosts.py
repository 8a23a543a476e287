"""Processes of one host that break the order of their steps (gc/PROTOCOL.md, section 7)."""

from __future__ import annotations

from typing import Any

from kvstore.host.tables import Number
from tests.mutants.catalogue.interfaces import KNOWN, at, giving
from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import several

SHARED = "kvstore.host.tables:Shared"
VIEW = "kvstore.node.host:HostView"
PRINTS = "kvstore.host.pins:PinnedPrints"
EVICTIONS = "host/test_eviction.py"
VIEWS = "host/test_view.py"
ROOMS = "host/test_room.py"
COLLECTORS = "host/test_collector.py"

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
        "HOST: a hold writes its table before it reads the log",
        several(at(VIEW, "protect", _protect_later), at(VIEW, "leading", _leading_first)),
        EVICTIONS,
    ),
    mutant(
        "host-tables-before-append",
        "HOST: an eviction appends its victims before it reads the tables",
        several(at(SHARED, "append", _append_later), at(PRINTS, "read", _append_after_pins)),
        EVICTIONS,
    ),
    mutant(
        "host-pins-before-tables",
        "HOST: an eviction reads the tables before the pins",
        at(PRINTS, "read", _pins_of_before),
        EVICTIONS,
    ),
    mutant(
        "host-unsettled-is-there",
        "HOST: a chunk of a batch that is not settled is a miss",
        at(VIEW, "leading", lambda real, self, wanted: (real(self, wanted), len(wanted))[1]),
        EVICTIONS,
        VIEWS,
    ),
    mutant(
        "host-take-over-leaves-the-batch",
        "HOST: a collector that takes over settles",
        at("kvstore.host.eviction", "settled", _nothing),
        EVICTIONS,
    ),
    mutant(
        "host-parents-first",
        "HOST: children are deleted before their parents",
        at("kvstore_gc.ranking:Ranking", "take", lambda real, self, *rest: real(self, *rest)[::-1]),
        EVICTIONS,
    ),
    mutant(
        "host-put-renews-no-parent",
        "HOST: a put renews the parents of what it published",
        at("kvstore.node.writer:Guard", "renew", giving(None)),
        EVICTIONS,
    ),
    mutant(
        "host-log-forgets-nothing",
        "HOST: the log clears what a process remembers",
        at(KNOWN, "forget_each", giving(None)),
        VIEWS,
    ),
    mutant(
        "host-overrun-forgets-nothing",
        "HOST: an overrun log clears all that a process remembers",
        at(KNOWN, "clear", giving(None)),
        VIEWS,
    ),
    mutant(
        "host-table-outlives-its-process",
        "HOST: a forked child does not keep the table of its parent",
        at("kvstore.host.tables:HoldTable", "forget", giving(None)),
        "host/test_tables.py",
    ),
    mutant(
        "host-no-limit",
        "HOST: no put brings the store above its limit",
        at("kvstore.host.room:Room", "reserve", _unlimited),
        ROOMS,
    ),
    mutant(
        "host-dropped-room-stays-taken",
        "HOST: room of a put that ended is free",
        at("kvstore.host.room:Reserved", "release", giving(None)),
        ROOMS,
    ),
    mutant(
        "host-first-limit-counts",
        "HOST: the smallest limit of all processes counts",
        at("kvstore.host.tables", "smallest", lambda real, tables, *own: real([], *own)),
        COLLECTORS,
    ),
]
