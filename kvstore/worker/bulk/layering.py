"""A held prefix layer by layer, over a bulk connection or gRPC: one layer is sent while the next one is read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import numpy as np

from kvstore.buffers import Planes
from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.holds import Hold
from kvstore.node.layers import Bands
from kvstore.node.node import Node
from kvstore.results import LayerMemory
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, encode_head, encode_index
from kvstore.wire.bulk.runs import SUM_BYTES, send_run
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.call import CallContext
from kvstore.worker.calls import Calls, seconds_left


def layers_of(
    node: Node, hold: Hold, count: int, in_flight: BytesInFlight, buffers: Buffers, context: CallContext
) -> Generator[tuple[int, memoryview]]:
    """Yields each layer of the ``count`` held chunks: its K of all chunks, then its V, until the next step.

    Raises HoldBroken between two layers. Close it.
    """
    if count < hold.count:
        raise InvalidRequest(f"chunks_max is {count}: expected 0 or {hold.count} for a hold read layer by layer")
    plane_bytes = count * hold.chain.namespace.layout.section_bytes
    with in_flight.reserved(4 * plane_bytes):
        both = [buffers.take(2 * plane_bytes) for _ in range(2)]

        def memory(layer: int) -> LayerMemory:
            # Two buffers in turn: when a layer begins, the one before the last has been sent.
            return LayerMemory(both[layer % 2][:plane_bytes], both[layer % 2][plane_bytes:])

        each_s = seconds_left(context, node.limits.read_deadline_s)
        with closing(node.read_layers(hold, memory, each_s, Bands(ahead=1))) as layers:
            for layer, _ in layers:
                yield layer, both[layer % 2]
        for buffer in both:  # whoever missed its deadline may still be reading into them: then this is not reached
            buffers.give(buffer)


def send_layers(
    channel: Channel, number: int, section_bytes: int, layers: Generator[tuple[int, memoryview]], calls: Calls
) -> None:
    """Sends layers, a LAYER frame each."""
    with closing(layers):
        for layer, memory in layers:
            head = encode_head(Kind.LAYER, number, INDEX_BYTES + len(memory) + 2 * SUM_BYTES)
            channel.send_bytes([memoryview(head + encode_index(layer))])
            planes = Planes(np.frombuffer(memory, np.uint8).reshape(1, 2, -1), section_bytes)
            send_run(channel, planes, 0, len(memory) // 2 // section_bytes)
            calls.add(WorkerCount.WIRE_BYTES_OUT, len(memory))
