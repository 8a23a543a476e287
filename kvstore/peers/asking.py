"""Asks one peer for chunks in its memory: one GET of the bulk protocol, whole images straight into the given memory.

The rim towards the peer: whatever goes wrong here becomes an answer with fewer images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from kvstore.address import Chain
from kvstore.client.bulk.links import BulkRefused, Link
from kvstore.client.endpoint import Endpoint
from kvstore.errors import KVStoreError
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import SPAN_BYTES, Kind, Mode, decode_slots, decode_span, encode_request
from kvstore.wire.messages import pack_tokens, traced
from kvstore.wire.statuses import UnknownNamespace


@dataclass(frozen=True, slots=True)
class Answer:
    """The number of leading images that came whole, and, if the peer must be left alone for a while, the reason."""

    count: int
    trouble: str | None = None
    took_s: float = 0.0
    """Seconds since the request was sent; excludes making a new connection, which says nothing about the next fetch."""


def ask(
    endpoint: Endpoint, chain: Chain, first: int, images: Sequence[memoryview], idle_s: float, most_s: float
) -> Answer:
    """Fills ``images``, each of the size of its file, with the chunks from index ``first`` on, unverified.

    Returns after ``idle_s`` without a byte, and after ``most_s`` in all.
    """
    count, began_s = 0, time.monotonic()
    try:
        with endpoint.calling(), endpoint.bulk.link(min(idle_s, most_s)) as link:
            if link is None:
                return Answer(0)  # all its connections are in use, or it was closed
            began_s = time.monotonic()
            link.channel.limit(idle_s, most_s)
            for count in _received(link, chain, first, images, most_s):  # noqa: B007  what came before it broke counts
                pass
    except BulkRefused as refused:
        error = refused.failed.error
        # Nobody has opened the namespace there, so the peer has no chunk of it: nothing is wrong with the peer.
        return Answer(count, None if isinstance(error, UnknownNamespace) else str(error))
    except grpc.RpcError as error:
        return Answer(count, f"gRPC: {error.code().name}")
    except (KVStoreError, grpc.FutureCancelledError, ValueError) as error:
        return Answer(count, str(error) or type(error).__name__)  # gRPC raises a ValueError for a closed channel
    return Answer(count, took_s=time.monotonic() - began_s)


def _received(link: Link, chain: Chain, first: int, images: Sequence[memoryview], timeout_s: float) -> Iterator[int]:
    """Yields after each image how many have come. Raises LinkBroken, LinkLate, BulkRefused."""
    stop = first + len(images)
    size = chain.namespace.layout.chunk_tokens
    request = pb.GetRequest(
        namespace=chain.namespace.digest,
        tokens=pack_tokens(chain.tokens[: stop * size]),
        first=first,
        chunks_max=stop,
        memory_only=True,
    )
    channel, number = link.channel, link.next_number()
    channel.send(Kind.GET, number, [encode_request(timeout_s, Mode.STREAM, traced(request))])
    left = decode_slots(link.receive(Kind.SLOTS)[1]).found - first
    at = 0
    while at < left:
        head = link.receive_head(Kind.IMAGES, Kind.END)
        if head.kind is Kind.END:
            channel.receive(head.length)
            return
        start, count = decode_span(channel.receive(SPAN_BYTES))
        run = images[at : at + count]
        if start != first + at or len(run) != count or head.length != SPAN_BYTES + sum(map(len, run)):
            raise channel.break_off(f"{head.length} bytes of images came: expected those from chunk {first + at} on")
        for image in run:
            channel.receive_into([image])
            at += 1
            yield at
