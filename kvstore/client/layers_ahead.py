"""Layers of held chunks: the next one is received from a worker while the caller uses the current one."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import grpc
import numpy as np

from kvstore.address import Chain
from kvstore.buffers import Withdrawn
from kvstore.client.bulk.layers import receive_layers
from kvstore.client.bulk.layers_given import GivenLayers
from kvstore.client.bulk.links import BulkRefused, Link
from kvstore.client.caller import CallFailed
from kvstore.client.endpoint import Endpoint
from kvstore.client.fetching import ChunkFetch
from kvstore.client.tools import Tools
from kvstore.counts import ClientCount
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError, StoreClosed
from kvstore.layout import Layout
from kvstore.node.lanes import Deadline
from kvstore.node.layers import Bands
from kvstore.node.wanted import leading
from kvstore.results import LayerMemory
from kvstore.sections import Planes
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.statuses import BrokenTransfer

log = logging.getLogger(__name__)

TIDY_S = 1.0


def _nothing() -> None:
    pass


class LayersAhead:
    """A thread that receives the next layer while the caller uses this one.

    ``each`` starts the thread, which calls ``memory``. ``close`` returns once nobody writes into that memory; call it
    however ``each`` ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hold_id: bytes,
        chain: Callable[[], Chain],
        layout: Layout,
        chunks: int,
        memory: Callable[[int], LayerMemory],
        tools: Tools,
        band: int,
    ) -> None:
        """``chain`` returns the held chunks, which take some time to hash. ``band`` layers may be read at once."""
        self._endpoint = endpoint
        self._hold_id = hold_id
        self._chain = chain
        self._layers = layout.layers
        self._section_bytes = layout.section_bytes
        self._chunks = chunks
        self._memory = memory
        self._band = band
        self._begun: dict[int, LayerMemory] = {}
        """The memory of the layers that are read now."""
        self._read = 0
        """Layers that are read and handed on. Another way of reading begins with the first of them once more."""
        self._filling = LayerMemory(memoryview(b""), memoryview(b""))
        self._tools = tools
        # No semaphore: its lock cannot be entered again, and a finalizer may call ``close`` at any moment.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(2 * band - 1):
            self._room.put(None)
        self._ready: queue.SimpleQueue[tuple[int, LayerMemory] | BaseException] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._writes = False
        self._pid = os.getpid()
        self._cancel: Callable[[], object] = _nothing
        self._is_begun = False
        self._thread = threading.Thread(target=self._run, name="kvstore-layers", daemon=True)

    def each(self) -> Iterator[tuple[int, LayerMemory]]:
        """Yields the layers in order. Raises HoldBroken."""
        self._thread.start()
        for _ in range(self._layers):
            filled = self._ready.get()
            if isinstance(filled, BaseException):
                raise filled
            self._room.put(None)
            yield filled

    def close(self) -> None:
        """Ends call and thread. Does nothing in a forked child: both belong to its parent."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            self._cancel()
            self._room.put(None)
            while self._writes:
                self._changed.wait()
        with suppress(RuntimeError):  # best effort: the thread may be dialling, or never have started
            self._thread.join(TIDY_S)

    def _run(self) -> None:
        try:
            self._tools.caller.at(self._endpoint, self._received)
        except Withdrawn:
            return
        except CallFailed as failed:
            self._ready.put(self._broken(failed.failed.error))
        except KVStoreError as error:
            self._ready.put(self._broken(error))
        except BaseException as error:  # noqa: BLE001  # of the caller's own ``memory``: whoever waits must hear of it
            self._ready.put(error)
        finally:
            self._written()

    def _received(self) -> None:
        try:
            self._receive()
        except grpc.RpcError:
            if self._closed:
                raise Withdrawn from None  # ``close`` cancelled it: the worker is not at fault
            raise

    def _receive(self) -> None:
        if not self._receive_bulk():
            self._receive_chunks()

    def _receive_bulk(self) -> bool:
        """Reads over a bulk connection, or what it gives to a client on the worker's host; False if neither goes."""
        limits = self._tools.limits
        with self._endpoint.bulk.link(limits.probe_s) as link:
            if link is None:
                return False
            self._started(link.channel.cut)
            try:
                given = self._given(link) if link.hands_files or link.memory is not None else None
                if given is None:
                    for layer in receive_layers(
                        link, self._hold_id, self._chunks, self._layers, limits.read_s, self._begin
                    ):
                        self._filled(layer)
                    return True
            except (LinkBroken, BulkRefused) as error:
                if self._closed:
                    raise Withdrawn from None  # cut by ``close``
                if self._is_begun:
                    raise error.failed.error if isinstance(error, BulkRefused) else error from None
                link.channel.alive = False
                link.shortage.note(error)
                log.info("client.bulk_broken worker=%s why=%s", self._endpoint.address, error)
                return False  # an older worker, or one that answers the same over gRPC
            finally:
                self._started(_nothing)  # the connection now belongs to another call
        return self._take(given)

    def _given(self, link: Link) -> GivenLayers | None:
        tools = self._tools
        return GivenLayers.of(link, self._hold_id, self._chunks, self._chain, tools.lanes, tools.limits.read_s)

    def _take(self, given: GivenLayers) -> bool:
        """Reads what was given; False as soon as a chunk is wrong: the worker finds out itself what is wrong with it
        when it is asked for the chunk over gRPC.
        """

        def cut() -> None:
            given.withdraw()
            self._written()  # the thread may wait on for a file on a root that hangs

        with closing(given):
            self._started(cut)
            for layers in Bands(self._band).of(self._layers):
                memories = [self._begin(layer) for layer in layers]
                deadline = Deadline(self._tools.lanes.clock, self._tools.limits.read_s)
                is_right = given.read(layers, memories, deadline)
                if self._closed:
                    raise Withdrawn
                if not is_right:
                    if not deadline.passed:
                        self._tools.counters.add(ClientCount.BULK_DAMAGED)
                    return False
                for layer in layers:
                    self._filled(layer)
        return True

    def _receive_chunks(self) -> None:
        """Reads all held chunks first, and hands on their layers."""
        chain, size = self._chain(), self._chunks * self._section_bytes
        array = np.empty((self._layers, 2, size), np.uint8)
        planes, request = Planes(array, self._section_bytes), pb.GetRequest(hold=self._hold_id)
        fetch = ChunkFetch(chain.namespace, chain.tokens, request, self._chunks, lambda _: planes, self._tools)
        fetch.receive(self._endpoint)
        if (found := leading(fetch.done)) < self._chunks:
            valid = found * chain.namespace.layout.chunk_tokens
            raise HoldBroken(f"a held chunk was lost: compute from token {valid} on", valid)
        for layer, (k, v) in enumerate(array):
            memory = self._begin(layer)
            memory.k[:], memory.v[:] = k.data, v.data
            self._filled(layer)

    def _begin(self, layer: int) -> LayerMemory:
        """Returns the memory for a layer, once the caller took the one before."""
        if layer < self._read:  # the caller has it, and may be using it
            size = self._chunks * self._section_bytes
            self._filling = LayerMemory(memoryview(bytearray(size)), memoryview(bytearray(size)))
            return self._filling
        is_new = layer not in self._begun
        if is_new:
            self._room.get()
        with self._changed:
            if self._closed:
                raise Withdrawn
            self._writes = self._is_begun = True
        if is_new:
            self._begun[layer] = self._memory(layer)
        self._filling = self._begun[layer]
        return self._filling

    def _filled(self, layer: int) -> None:
        if layer < self._read:
            return
        self._written()
        self._read = layer + 1
        self._ready.put((layer, self._begun.pop(layer)))

    def _written(self) -> None:
        with self._changed:
            self._writes = False
            self._changed.notify_all()

    def _broken(self, error: KVStoreError) -> KVStoreError:
        if isinstance(error, (HoldBroken, StoreClosed)):
            return error
        is_damage = isinstance(error, (BrokenTransfer, InvalidRequest))
        self._tools.counters.add(ClientCount.MISSES_DAMAGED if is_damage else ClientCount.MISSES_UNREACHABLE)
        return HoldBroken(f"not all layers arrived: compute all tokens again ({error})", 0)

    def _started(self, cancel: Callable[[], object]) -> None:
        with self._changed:
            self._cancel = cancel
            if self._closed:
                cancel()
