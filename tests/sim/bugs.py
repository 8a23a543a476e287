"""Bugs of one host and of the capacity, planted into the real code: the simulation must find each.

Each is a context in which the code lacks one rule. Those with the name of a rule of ``tests/model/host.py`` drop that
rule. Bugs of a cluster are the mutants of ``tests/mutants`` (``mutants.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from kvstore.core.address import Address
from kvstore.engine import writer
from kvstore.engine.capacity import WAIT_S, CreditReservation, NodeUsage
from kvstore.engine.chunk_store import PresenceCache
from kvstore.engine.engine import Engine
from kvstore.engine.gc_state import NOTHING, ChunkHold, Holds, HostGcState
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.host import eviction
from kvstore.host.eviction import Evicted, Eviction, EvictionVictim
from kvstore.host.pins import PinnedPrints
from kvstore.host.tables import HostRoom, Number
from kvstore.meta.usage import UsageReport
from kvstore_gc.capacity import Accounts, Level

Bug = Callable[[], AbstractContextManager[object]]

BUGS: dict[str, Bug] = {}
HOMES: dict[str, str] = {}
"""The profile whose runs show a bug most often, for a quick test."""


def bug(home: str) -> Callable[[Callable[[], Iterator[None]]], Bug]:
    """Registers a bug under its function's name; the first line of its docstring says which rule it drops."""

    def register(make: Callable[[], Iterator[None]]) -> Bug:
        planted = contextmanager(make)
        BUGS[make.__name__] = planted
        HOMES[make.__name__] = home
        return planted

    return register


HOME = "one_host"
code: Any = eviction
"""The module, with what it imports."""


@bug(HOME)
def table_before_tail() -> Iterator[None]:
    """A hold reads the log, and then writes its table."""

    def take(self: Holds, chain: ChunkKeys, *more: Any, asked: bytes = b"", **named: Any) -> ChunkHold:
        with patch.object(self._view, "protect", lambda packed: None):
            hold = real(self, chain, *more, **named)
        hold.mark = self._view.protect(asked or chain.packed_addresses)
        return hold

    real = Holds.take
    with patch.object(Holds, "take", take):
        yield


@bug(HOME)
def unsettled_is_a_miss() -> Iterator[None]:
    """A chunk that is being evicted is looked for as any other."""

    def evicting(self: HostGcState) -> frozenset[bytes]:
        real(self)
        return NOTHING

    real = HostGcState._evicting
    with patch.object(HostGcState, "_evicting", evicting):
        yield


@bug(HOME)
def log_clears_cache() -> Iterator[None]:
    """A process remembers what the log names."""
    with patch.object(PresenceCache, "forget_each", lambda self, packed: None):
        yield


@bug(HOME)
def overrun_clears_cache() -> Iterator[None]:
    """A process that is more than a ring behind remembers everything."""
    with patch.object(PresenceCache, "clear", lambda self: None):
        yield


@bug(HOME)
def matches_mind_unsettled() -> Iterator[None]:
    """A match looks for what is being evicted, and remembers it."""

    def match(self: Engine, chain: ChunkKeys, deadline_s: float | None = None, *, counts: bool = True) -> int:
        self.gc_view.leading(chain)
        return self.reader.matched_count(chain, self._deadline(deadline_s, self.limits.match_deadline_s))

    def read_log(self: HostGcState, tail: int) -> None:
        self._unsettled = NOTHING  # they are not forgotten once more either
        real(self, tail)

    real = HostGcState._read_log
    with patch.object(Engine, "match", match), patch.object(HostGcState, "_read_log", read_log):
        yield


@contextmanager
def evicting(batch: Callable[[Eviction, Sequence[EvictionVictim], bool, Evicted], None]) -> Iterator[None]:
    """Another way of evicting one batch."""

    def evict(self: Eviction, victims: Sequence[EvictionVictim], *, even_pinned: bool = False) -> Evicted:
        done = Evicted()
        for start in range(0, len(victims), code.BATCH_MAX):
            batch(self, victims[start : start + code.BATCH_MAX], even_pinned, done)
        return done

    with patch.object(Eviction, "evict", evict):
        yield


def delete(self: Eviction, victims: Sequence[EvictionVictim], in_use: tuple[Any, Any], done: Evicted) -> None:
    """Deletes what is free."""
    for victim, is_held, is_pinned in zip(victims, *map(np.ndarray.tolist, in_use), strict=True):
        self._delete(victim, is_held, is_pinned, done)


@bug(HOME)
def append_before_tables() -> Iterator[None]:
    """The tables are read before the victims are in the log."""

    def batch(self: Eviction, part: Sequence[EvictionVictim], even_pinned: bool, done: Evicted) -> None:
        in_use = self._in_use(part, even_pinned)
        with self._batch(part):
            delete(self, part, in_use, done)

    with evicting(batch):
        yield


@bug(HOME)
def reads_pins() -> Iterator[None]:
    """Nobody reads the pins."""
    with patch.object(PinnedPrints, "read", lambda self: np.zeros(0, np.uint64)):
        yield


@bug(HOME)
def stat_after_tables() -> Iterator[None]:
    """The last use is read before the tables."""

    def batch(self: Eviction, part: Sequence[EvictionVictim], even_pinned: bool, done: Evicted) -> None:
        since_ns, used = self._since_ns, set[Address]()
        for victim in part:
            path = f"{self._root.path}/{places.chunk(victim.address, victim.namespace, self._shard_bits)}"
            try:
                if code.os.lstat(path).st_ctime_ns >= since_ns:
                    used.add(victim.address)
            except FileNotFoundError:
                pass
        self._since_ns = math.inf  # type: ignore[assignment]
        with self._batch(part):
            held, pinned = self._in_use(part, even_pinned)
            for at, victim in enumerate(part):
                held[at] |= victim.address in used
            delete(self, part, (held, pinned), done)
        self._since_ns = since_ns

    with evicting(batch):
        yield


@bug(HOME)
def one_evicts() -> Iterator[None]:
    """A clear and a collector evict at the same time."""

    @contextmanager
    def batch(self: Eviction, victims: Sequence[EvictionVictim]) -> Iterator[None]:
        with patch.object(code.fcntl, "flock", lambda fd, kind: None), real(self, victims):
            pass
        yield

    real = Eviction._batch
    with patch.object(Eviction, "_batch", batch):
        yield


@bug(HOME)
def settles_last() -> Iterator[None]:
    """A batch is settled before its files are deleted."""

    def batch(self: Eviction, part: Sequence[EvictionVictim], even_pinned: bool, done: Evicted) -> None:
        with self._batch(part):
            in_use = self._in_use(part, even_pinned)
        delete(self, part, in_use, done)

    with evicting(batch):
        yield


@bug(HOME)
def children_first() -> Iterator[None]:
    """A batch deletes parents first."""

    def evict(self: Eviction, victims: Sequence[EvictionVictim], *, even_pinned: bool = False) -> Evicted:
        return real(self, victims[::-1], even_pinned=even_pinned)

    real = Eviction.evict
    with patch.object(Eviction, "evict", evict):
        yield


@bug(HOME)
def skips_ancestors() -> Iterator[None]:
    """What stays keeps no ancestors."""
    with patch.object(Eviction, "_keep", lambda self, victim: None):
        yield


@bug(HOME)
def put_holds_parent() -> Iterator[None]:
    """A put does not keep what it builds on."""

    class Open(writer.PutGuard):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._view.unprotect(self._mark)

        def release(self) -> None:
            pass

    with patch.object(writer, "PutGuard", Open):
        yield


@bug(HOME)
def put_renews_parent() -> Iterator[None]:
    """A put does not renew the parents of what it published."""
    with patch.object(writer.PutGuard, "unlisted", lambda self, fresh: []):
        yield


@bug(HOME)
def room_is_limited() -> Iterator[None]:
    """A put begins whatever the limit is."""

    def take(self: HostRoom, size_bytes: int) -> bool:
        if not real(self, size_bytes):
            self._reserved += size_bytes
            self._shared.add(Number.USED, size_bytes)
        return True

    real = HostRoom._take
    with patch.object(HostRoom, "_take", take):
        yield


@bug(HOME)
def room_is_given_back() -> Iterator[None]:
    """What a put reserved and did not write stays reserved."""

    def settle(self: HostRoom) -> None:
        self._released.clear()
        real(self)

    real = HostRoom._settle
    with patch.object(HostRoom, "_settle", settle):
        yield


# Of the capacity (gc/PROTOCOL.md, section 6).


@bug("full")
def credits_ignore_puts() -> Iterator[None]:
    """A put reserves one byte, however large it is."""

    def reserve(
        self: NodeUsage, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None, wait_s: float = WAIT_S
    ) -> CreditReservation:
        return real(self, min(size_bytes, 1))

    real = NodeUsage.reserve
    with patch.object(NodeUsage, "reserve", reserve), patch.object(NodeUsage, "wrote", lambda self, size_bytes: None):
        yield


@bug("full")
def credits_ignore_the_level() -> Iterator[None]:
    """Nodes get a whole credit at any level."""
    with patch.object(Level, "spare_bytes", property(lambda self: self.headroom_bytes // 2)):
        with patch.object(Level, "excess_bytes", property(lambda self: 0)):
            yield


@bug("full")
def reports_are_not_counted() -> Iterator[None]:
    """The level stays as it was listed."""

    def reported(self: Accounts, reporter: bytes, usage: UsageReport) -> None:
        pass

    with patch.object(Accounts, "reported", reported):
        yield


@bug("full")
def nothing_is_evicted() -> Iterator[None]:
    """The root stays full."""
    with patch.object(Level, "excess_bytes", property(lambda self: 0)):
        with patch("kvstore_gc.cycle.Cycle._needed_bytes", lambda self: 0.0):
            yield
