"""Putting chunks and blocks to a worker past gRPC, straight from the caller's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.client.bulk.cargo import Cargo
from kvstore.client.bulk.sending import send_put
from kvstore.client.endpoint import Endpoint
from kvstore.client.tools import Tools
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken

log = logging.getLogger(__name__)

T = TypeVar("T")


def put_past_grpc(
    endpoint: Endpoint,
    start: pb.PutStart | pb.PutBlocksStart,
    cargo: Callable[[], Cargo],
    answered: Callable[[bytes], T],
    tools: Tools,
    timeout_s: float,
) -> T | None:
    """Puts what ``cargo()`` has over a bulk connection; None if there is none, or it broke.

    ``answered`` reads the worker's answer, and raises InvalidRequest if that makes no sense.
    """
    with endpoint.bulk.link(timeout_s) as link:
        if link is None:
            return None
        tools.counters.add(ClientCount.PUTS_SHARED if link.is_shared else ClientCount.PUTS_TCP)
        try:
            answer = send_put(
                link,
                start,
                cargo(),
                # That is acknowledged when the bytes have come: not for a writer who waits for the root.
                behind=start.write == pb.WRITE_BEHIND,
                reserve=partial(endpoint.bulk.reserve_arena, link),
                idle_s=tools.limits.write_s,
                timeout_s=timeout_s,
                lanes=tools.lanes,
            )
            return answered(answer)
        except (LinkBroken, InvalidRequest) as error:
            link.channel.alive = False
            log.info("client.bulk_broken worker=%s why=%s", endpoint.address, error)
            tools.counters.add(ClientCount.BULK_BROKEN)
    return None
