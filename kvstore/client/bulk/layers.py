"""Reading held chunks over a bulk connection layer by layer, each layer verified before it is handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.client.bulk.links import Link
from kvstore.errors import HoldBroken
from kvstore.results import LayerMemory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, Mode, decode_index, encode_request
from kvstore.wire.bulk.runs import SUM_BYTES, receive_planes
from kvstore.wire.messages import parse, traced
from kvstore.wire.statuses import BrokenTransfer

LAYERS_S_MAX = 900.0
"""Limit of a whole layer-by-layer read. The engine sets its speed, so its deadline does not follow its size."""


def started(
    link: Link, hold_id: bytes, chunks: int, mode: Mode, idle_s: float, order: pb.Order = pb.ORDER_CHUNKS
) -> int:
    """Asks for the held ``chunks``; returns the number of the request. Raises HoldBroken if some are not left, and as
    ``receive_layers`` does.
    """
    channel, number = link.channel, link.next_number()
    channel.limit(idle_s, LAYERS_S_MAX)
    request = pb.GetRequest(hold=hold_id, order=order)
    channel.send(Kind.GET, number, [encode_request(LAYERS_S_MAX, mode, traced(request))])
    found = parse(pb.GetStart, link.receive(Kind.START)[1]).chunks
    if found != chunks:
        channel.alive = False
        raise HoldBroken(f"only {found} of {chunks} held chunks are left: match again", 0)
    return number


def receive_layers(
    link: Link, hold_id: bytes, chunks: int, layers: int, idle_s: float, memory: Callable[[int], LayerMemory]
) -> Iterator[int]:
    """Reads all layers of the held ``chunks`` into ``memory(layer)``; yields each layer when it is complete.

    Raises HoldBroken, BrokenTransfer, BulkRefused, LinkBroken, LinkLate; and whatever ``memory`` raises.
    """
    channel, number = link.channel, started(link, hold_id, chunks, Mode.STREAM, idle_s, pb.ORDER_LAYERS)
    for layer in range(layers):
        head = link.receive_head(Kind.LAYER)
        if head.request != number:  # a layer says nothing else of where it belongs
            raise channel.break_off(f"a layer of request {head.request} came: expected {number}")
        into = memory(layer)
        length = INDEX_BYTES + 2 * (len(into.k) + SUM_BYTES)
        if head.length != length or decode_index(channel.receive(INDEX_BYTES)) != layer:
            raise channel.break_off(
                f"received a layer of {head.length} bytes: expected layer {layer}, of {length} bytes"
            )
        if not receive_planes(channel, [into.k, into.v]):
            channel.alive = False
            raise BrokenTransfer(f"layer {layer} does not match its checksums: bytes changed on the way")
        yield layer
    link.receive(Kind.END)
