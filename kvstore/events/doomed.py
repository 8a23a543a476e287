"""Chunks that collectors and clears are about to delete, as etcd tells every node before it happens.

A condemned chunk is a miss for every node from that moment (gc/PROTOCOL.md, H1), so that is when routers hear of it.
When a sweep or a clear has ended, only a listing tells what it spared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvstore.census.selection import ClearOrder
from kvstore.errors import InvalidRequest, RootMismatch
from kvstore.events.limits import EventLimits
from kvstore.meta.interface import KeyValue, Meta, Watch, WatchLost
from kvstore.meta.keys import Keys
from kvstore.meta.sweeps import Condemned, Members
from kvstore.namespace import NamespaceId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class News:
    """The changes since the last look."""

    begun: set[int] = field(default_factory=set)
    """Shards that a sweep has condemned chunks of."""
    ended: set[int] = field(default_factory=set)
    """Shards whose sweep is over: list them."""
    clear_begun: bool = False
    clear_ended: bool = False
    """A clear is over: list everything."""


class Doomed:
    """Follows the keys of sweeps and of clears that delete. Used by one thread."""

    def __init__(self, meta: Meta, keys: Keys, limits: EventLimits) -> None:
        self._meta = meta
        self._keys = keys
        self._limits = limits
        self._sweeps: dict[int, tuple[bytes, Members | None]] = {}
        self._clears: dict[str, ClearOrder] = {}
        self._watches: dict[str, Watch] = {}

    def news(self) -> News:
        """Applies what happened since the last call. Raises Unavailable if a lost watch could not begin again."""
        news = News()
        for prefix in (self._keys.gc, self._keys.barriers):
            try:
                watch = self._watches.get(prefix) or self._begin(prefix, news)
                while (events := watch.next(0.0)) is not None:
                    for event in events:
                        self._hear(event.key, event.kv, news)
            except WatchLost as lost:
                log.info("events.watch_lost %s %s", prefix, lost)
                self._watches.pop(prefix).close()
        return news

    def condemned(self, shard: int) -> Members | None:
        """Returns what the sweep of a shard condemns; None if there is none."""
        found = self._sweeps.get(shard)
        return None if found is None else found[1]

    def hides(self, namespace: bytes) -> bool:
        """True if a clear is deleting all of a namespace, by its id."""
        return any(_takes_all(order) and order.means(NamespaceId(namespace)) for order in self._clears.values())

    def close(self) -> None:
        """Ends the watches. Idempotent."""
        for watch in self._watches.values():
            watch.close()
        self._watches = {}

    def _begin(self, prefix: str, news: News) -> Watch:
        """Reads everything under a prefix, and watches from there on."""
        snapshot = self._meta.list(prefix, self._limits.meta_deadline_s)
        watch = self._watches[prefix] = self._meta.watch(prefix, snapshot.revision + 1)
        there = {kv.key for kv in snapshot.items}
        if prefix == self._keys.gc:
            before = {self._keys.condemned_in(shard) for shard in self._sweeps}
        else:
            before = set(self._clears)
        for gone in before - there:
            self._hear(gone, None, news)
        for kv in snapshot.items:
            self._hear(kv.key, kv, news)
        return watch

    def _hear(self, key: str, kv: KeyValue | None, news: News) -> None:
        shard = self._keys.parse_condemned(key)
        if shard is not None:
            self._hear_sweep(shard, kv, news)
        elif key.startswith(self._keys.barriers):
            self._hear_clear(key, kv, news)

    def _hear_sweep(self, shard: int, kv: KeyValue | None, news: News) -> None:
        before = self._sweeps.pop(shard, None)
        if kv is not None:
            try:
                members = Members(Condemned.from_bytes(kv.value))
            except RootMismatch as error:
                log.warning("events.sweep_unreadable shard=%04x %s", shard, error)
                members = None
            self._sweeps[shard] = (kv.value, members)
            news.begun.add(shard)
        if before is not None and (kv is None or kv.value != before[0]):
            news.ended.add(shard)

    def _hear_clear(self, key: str, kv: KeyValue | None, news: News) -> None:
        if kv is None:
            news.clear_ended |= self._clears.pop(key, None) is not None
            return
        try:
            self._clears[key] = ClearOrder.from_json(kv.value)
            news.clear_begun = True
        except InvalidRequest as error:
            log.warning("events.clear_unreadable %s", error)
            news.clear_ended = True


def _takes_all(order: ClearOrder) -> bool:
    return order.lineages is None and not order.unused_since_s
