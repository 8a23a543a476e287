"""The clear orders that are kept. A node consults them for each copy that it is about to keep.

They keep cleared chunks from coming back into its memory or disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.census.selection import ClearOrder
from kvstore.format.header import Incarnation
from kvstore.format.lineage import LineageId, written
from kvstore.namespace import NamespaceDigest


class Standing:
    """Immutable. Without orders, asking costs nothing."""

    __slots__ = ("_by_lineage", "_others")

    def __init__(self, orders: Iterable[ClearOrder] = ()) -> None:
        self._by_lineage: dict[LineageId, list[ClearOrder]] = {}
        self._others: list[ClearOrder] = []
        for order in orders:
            if order.unused_since_s:
                continue  # what is read now is not unused any more
            if order.lineages is None:
                self._others.append(order)
            for lineage in order.lineages or ():
                self._by_lineage.setdefault(lineage, []).append(order)

    def __bool__(self) -> bool:
        return bool(self._by_lineage or self._others)

    def forbids(self, namespace: NamespaceDigest, incarnation: Incarnation) -> bool:
        """True if a copy with this incarnation was cleared and must not be kept."""
        found = written(incarnation) if self._by_lineage else None
        orders = self._by_lineage.get(found.lineage, ()) if found is not None else ()
        return any(order.forbids(namespace, incarnation, 0.0) for order in (*orders, *self._others))


NOTHING = Standing()
