"""Renewing recency behind the reads: parents before children, once per quantum, on a thread of its own.

A thread of its own because renewal is advice to garbage collection: it must cost a reader nothing, and a root that
hangs must stop nothing else.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from kvstore.address import Address
from kvstore.errors import KVStoreError
from kvstore.namespace import NamespaceId
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.recency import stamp_ns


@dataclass(frozen=True, slots=True)
class _Renewal:
    namespace: NamespaceId
    addresses: tuple[Address, ...]
    chained: bool


class Refresher:
    """A bounded queue of what was used."""

    def __init__(self, chunks: Chunks, counters: Counters, queue_max: int) -> None:
        self._chunks = chunks
        self._counters = counters
        self._queue: queue.Queue[_Renewal | None] = queue.Queue(queue_max)
        self._thread = threading.Thread(target=self._serve, name="kvstore-refresh", daemon=True)
        self._enabled = chunks.root.traits.touch
        self._closed = False
        self._thread.start()

    def used(self, namespace: NamespaceId, addresses: tuple[Address, ...], *, chained: bool) -> None:
        """These were read, or found by a put: a chain from its first chunk on, or single blocks. Never blocks."""
        if not self._enabled or not addresses or self._closed:
            return
        if not self._chunks.known.unrenewed(addresses, self._chunks.quantum()):
            return
        try:
            self._queue.put_nowait(_Renewal(namespace, addresses, chained))
        except queue.Full:
            self._counters.add("refresh_dropped", len(addresses))

    def renew(self, namespace: NamespaceId, chain: tuple[Address, ...]) -> None:
        """Renews the leading chunks of a chain on the calling lane, before a child of theirs gets a fresh stamp."""
        if self._enabled and chain:
            try:
                self._renew(_Renewal(namespace, chain, chained=True))
            except KVStoreError:
                self._counters.add("refresh_dropped")

    def drain(self) -> None:
        """Returns when everything queued so far is done."""
        self._queue.join()

    def close(self, timeout_s: float = 1.0) -> None:
        """Finishes what is queued, as far as it gets within ``timeout_s``."""
        if self._closed:
            return
        self._closed = True
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while True:
            renewal = self._queue.get()
            try:
                if renewal is None:
                    return
                self._renew(renewal)
            except KVStoreError:
                self._counters.add("refresh_dropped")
            finally:
                self._queue.task_done()

    def _renew(self, renewal: _Renewal) -> None:
        chunks = self._chunks
        quantum = chunks.quantum()
        for index in chunks.known.unrenewed(renewal.addresses, quantum):
            address = renewal.addresses[index]
            stamp = stamp_ns(quantum, index if renewal.chained else 0)
            if chunks.root.touch(chunks.name(address, renewal.namespace), stamp):
                chunks.known.add(address, quantum, renewed=True)
                self._counters.add("refreshed")
                continue
            # Gone, or not ours to touch. The children of a chunk keep their older stamps then, because a chunk is
            # never staler than its child.
            self._counters.add("refresh_dropped")
            if renewal.chained:
                return
