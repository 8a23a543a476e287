"""Holds at one worker: if that worker is gone, so is the hold, and reading raises.

A chunk or block lost under a live hold is a miss. ``HoldBroken`` means that the hold has ended, or that its worker does
not answer, so nobody knows whether it still protects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Sections
from kvstore.client.bulk.receiving import Views
from kvstore.client.caller import CallFailed, Tools
from kvstore.client.endpoints import Endpoint
from kvstore.client.fetching import ChunkFetch, Fetch
from kvstore.counts import ClientCount
from kvstore.errors import HoldBroken, StoreClosed
from kvstore.keyset import leading
from kvstore.namespace import Namespace
from kvstore.results import LayerMemory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import unpack_tokens
from kvstore.wire.statuses import BrokenTransfer

RELEASE_S = 2.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Lease:
    """Implements ``LeasedHold``."""

    id: bytes
    lease_s: float
    endpoint: Endpoint
    renewed_s: float
    ended: bool = False


class HeldAtWorker:
    """A hold at one worker, renewed until it is released. ``endpoint`` is None if nothing is held.

    Reads of what is held are given to ``_receive``.
    """

    def __init__(self, answer: pb.HoldResponse, endpoint: Endpoint | None, tools: Tools) -> None:
        self._tools = tools
        self._lock = threading.Lock()
        self._released = False
        self._lease: _Lease | None = None
        self._hold_id: bytes = answer.hold
        if endpoint is not None:
            endpoint.use()
            self._lease = _Lease(answer.hold, answer.lease_s, endpoint, tools.lanes.clock.monotonic_s())
            tools.renewing.add(self._lease)

    @property
    def protects(self) -> bool:
        lease = self._lease
        return lease is not None and not (lease.ended or self._released or self._tools.caller.is_closed)

    def release(self) -> None:
        """Ends the hold; idempotent, never raises."""
        with self._lock:
            if self._released:
                return
            self._released = True
        if self._lease is None:
            return
        self._tools.renewing.remove(self._lease)
        request = pb.ReleaseRequest(hold=self._lease.id)
        endpoint = self._lease.endpoint
        try:
            self._tools.caller.at(endpoint, lambda: endpoint.call("Release", request, RELEASE_S))
        except (CallFailed, StoreClosed):
            pass  # a worker that is gone holds nothing; any other lets go when the hold's lease is over
        endpoint.leave()

    def _receive(self, fetch: Fetch, tokens_valid: Callable[[], int] = lambda: 0) -> None:
        """Reads from the worker that has the hold; nothing if nothing is held.

        Raises HoldBroken, with what ``tokens_valid`` says then.
        """
        self.check()
        if self._lease is None:
            return
        endpoint = self._lease.endpoint
        try:
            self._tools.caller.at(endpoint, partial(fetch.receive, endpoint))
        except BrokenTransfer:
            pass  # counted where it was found; what came before it is good
        except CallFailed as failed:
            error = failed.failed.error
            if isinstance(error, HoldBroken):
                raise error from failed
            self._tools.counters.add(ClientCount.MISSES_UNREACHABLE)
            if not failed.failed.answered:
                raise HoldBroken(
                    f"the worker that has the hold does not answer ({error}): match again", tokens_valid()
                ) from failed

    def check(self) -> None:
        """Raises HoldBroken once the hold has ended, as far as this process knows."""
        lease = self._lease
        if self._released or lease is None or lease.ended:
            self._tools.caller.check()  # nothing is sent; a store that is closed says so all the same
        if self._released:
            raise HoldBroken("the hold has ended (it was released): match again")
        if lease is not None and lease.ended:
            raise HoldBroken(
                "the hold has ended (its worker was restarted or lost its session, or this process did not renew it in "
                "time): match again"
            )


class RemoteHold(HeldAtWorker):
    """Held leading chunks of one prompt."""

    def __init__(
        self,
        namespace: Namespace,
        packed_tokens: bytes,
        answer: pb.HoldResponse,
        endpoint: Endpoint | None,
        tools: Tools,
    ) -> None:
        super().__init__(answer, endpoint, tools)
        self.chunks = answer.chunks
        self._namespace = namespace
        self._packed = packed_tokens
        self._layout = namespace.layout

    def read(self, sections: Sections) -> int:
        return self._fetch(lambda _: sections)

    def view(self) -> list[npt.NDArray[Any]]:
        views = Views(self._layout)
        return views.leading(self._fetch(views.sections, views))

    def layers(self, memory: Callable[[int], LayerMemory], band: int) -> Iterator[tuple[int, LayerMemory]]:
        """Slices of the chunks, which are all received or lent before the first layer: ``band`` has no effect."""
        chunks, layout = self.view(), self._layout
        if len(chunks) < self.chunks:
            valid, end = len(chunks) * layout.chunk_tokens, (len(chunks) + 1) * layout.chunk_tokens
            raise HoldBroken(f"the chunk of tokens {valid} to {end} was lost: compute from token {valid} on", valid)
        parts = [chunk.view(np.uint8).reshape(layout.layers, 2, -1) for chunk in chunks]
        for layer in range(layout.layers if parts else 0):
            self.check()  # what was given can be read on, but nothing protects it any more
            into = memory(layer)
            for plane, target in enumerate((into.k, into.v)):
                np.concatenate([part[layer, plane] for part in parts], out=np.frombuffer(target, np.uint8))
            yield layer, into

    def _fetch(self, memory: Callable[[int], Sections], views: Views | None = None) -> int:
        request, tokens = pb.GetRequest(hold=self._hold_id), unpack_tokens(self._packed)
        fetch = ChunkFetch(self._namespace, tokens, request, self.chunks, memory, self._tools, views)
        self._receive(fetch, lambda: leading(fetch.done) * self._layout.chunk_tokens)
        return leading(fetch.done)
