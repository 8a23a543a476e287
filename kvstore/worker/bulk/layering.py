"""A held prefix sent layer by layer; the next layer is read while the current one is sent."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import cast

import numpy as np

from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.results import LayerMemory
from kvstore.sections import Planes
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, encode_head, encode_index
from kvstore.wire.bulk.runs import SUM_BYTES, send_run
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.context import CallContext


def send_layers(
    node: Node,
    channel: Channel,
    number: int,
    hold: Hold,
    count: int,
    in_flight: BytesInFlight,
    buffers: Buffers,
    calls: Calls,
    context: CallContext,
) -> None:
    """Sends all layers of the ``count`` held chunks, one LAYER frame each. Raises HoldBroken between two layers."""
    if count < hold.count:
        raise InvalidRequest(f"chunks_max is {count}: expected 0 or {hold.count} for a hold read layer by layer")
    section_bytes = hold.chain.namespace.layout.section_bytes
    plane_bytes = count * section_bytes
    with in_flight.reserved(4 * plane_bytes):
        both = [buffers.take(2 * plane_bytes) for _ in range(2)]

        def memory(layer: int) -> LayerMemory:
            # Two buffers in turn: when a layer begins, the one before the last has been sent.
            return LayerMemory(both[layer % 2][:plane_bytes], both[layer % 2][plane_bytes:])

        each_s = seconds_left(context, node.limits.read_deadline_s)
        layers = cast("Generator[tuple[int, LayerMemory]]", node.read_layers(hold, memory, each_s))
        with closing(layers):
            for layer, _ in layers:
                head = encode_head(Kind.LAYER, number, INDEX_BYTES + 2 * (plane_bytes + SUM_BYTES))
                channel.send_bytes([memoryview(head + encode_index(layer))])
                planes = np.frombuffer(both[layer % 2], np.uint8).reshape(1, 2, -1)
                send_run(channel, Planes(planes, section_bytes), 0, count)
                calls.add(WorkerCount.WIRE_BYTES_OUT, 2 * plane_bytes)
        for buffer in both:  # not reached after a missed deadline: a late lane may still be reading into them
            buffers.give(buffer)
