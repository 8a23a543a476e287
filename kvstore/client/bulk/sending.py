"""A put over a bulk connection: chunks are copied into the arena, or sent from the caller's memory as they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvstore.client.bulk.arena import Arena
from kvstore.client.bulk.copying import copy_rows
from kvstore.client.bulk.links import Link
from kvstore.client.tools import FileLanes
from kvstore.errors import Unavailable
from kvstore.layout import Layout
from kvstore.node.deadline import Deadline
from kvstore.sections import Planes
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import (
    RUN_BYTES_MAX,
    SPAN_BYTES,
    Kind,
    Placed,
    decode_span,
    encode_head,
    encode_placed,
    encode_request,
    encode_span,
)
from kvstore.wire.bulk.runs import SUM_BYTES, send_run
from kvstore.wire.messages import parse
from kvstore.wire.traces import traced

RUNS_MIN = 4
"""Runs for which an arena must have room: the worker keeps up to three, and the end of the ring may be too short."""
FULL_PAUSE_S = 0.0005
"""Between two looks at an arena that is full."""
LAST_WORD_S = 1.0


def send_put(
    link: Link,
    layout: Layout,
    start: pb.PutStart,
    count: int,
    planes: Planes,
    *,
    deferred: bool,
    reserve: Callable[[int], int],
    idle_s: float,
    timeout_s: float,
    lanes: FileLanes,
) -> tuple[int, pb.PutResponse]:
    """The first chunk that had to be sent, and the worker's answer. ``count``: the full chunks of the prompt.

    ``reserve(bytes)`` says how many of so many bytes an arena may have.
    Raises LinkBroken, LinkLate, BulkRefused, InvalidRequest for what makes no sense.
    """
    channel, ends_s = link.channel, time.monotonic() + timeout_s
    channel.limit(idle_s, timeout_s)
    size_bytes = (count - start.first) * layout.chunk_bytes
    run = max(1, RUN_BYTES_MAX // layout.chunk_bytes)
    link.share(size_bytes if deferred else min(size_bytes, RUNS_MIN * run * layout.chunk_bytes), reserve)
    arena, number = link.arena, link.next_number()
    while arena is not None and not arena.has_entry(number):
        if not channel.is_quiet():
            raise channel.break_off("the worker went away while chunks of earlier puts were in the arena")
        pause(ends_s)
    # A put that does not fit into the arena as a whole has to be stored while it is copied.
    in_arena = arena is not None and arena.size_bytes >= size_bytes
    deferred = deferred and (in_arena or not link.is_shared)
    channel.send(Kind.PUT, number, [encode_request(timeout_s, int(deferred), traced(start))])
    payload = link.receive(Kind.READY)[1]
    first, wanted = decode_span(payload)
    if wanted and not (start.first <= first and first + wanted == count):
        raise channel.break_off(f"chunks {first} to {first + wanted - 1} are wanted of {count}")
    try:
        if arena is not None and deferred:
            run = max(1, wanted)
        elif arena is not None and arena.size_bytes < min(RUNS_MIN * run, wanted + run) * layout.chunk_bytes:
            arena = None  # so small that the worker would wait for the next run, and we for it to release one
        for at in range(first, first + wanted, run):
            size = min(run, first + wanted - at)
            if at > first and not channel.is_quiet():
                break  # it has something to say: that it refuses
            if arena is not None:
                _place(link, arena, layout, number, planes, first, at, size, ends_s, lanes)
            else:
                _send(link, layout, number, planes, at, size)
        _, answer = link.receive(Kind.STORED)
    except LinkBroken as broken:
        hear_why(link)
        raise broken
    return first, parse(pb.PutResponse, answer)


def _place(
    link: Link,
    arena: Arena,
    layout: Layout,
    number: int,
    planes: Planes,
    first: int,
    at: int,
    count: int,
    ends_s: float,
    lanes: FileLanes,
) -> None:
    assert planes.covers(at, count) and planes.is_contiguous
    size_bytes = count * layout.chunk_bytes
    while (offset := arena.take(size_bytes, number, at + count - first)) is None:
        if not link.channel.is_quiet():
            return  # what it says is read by the caller
        pause(ends_s)
    target = arena.bytes_at(offset, size_bytes)
    start: int = target.__array_interface__["data"][0]
    to = np.arange(start, start + size_bytes, size_bytes // layout.section_count, dtype=np.uint64)
    source = planes.addresses() + np.uint64(planes.offset(at))
    deadline = Deadline(lanes.clock, ends_s - time.monotonic())
    copy_rows(to, source, size_bytes // layout.section_count, (target, planes), lanes.copiers(), deadline)
    link.channel.send(Kind.PLACED, number, [encode_placed(Placed(at, count, offset))])


def _send(link: Link, layout: Layout, number: int, planes: Planes, at: int, count: int) -> None:
    length = SPAN_BYTES + count * layout.chunk_bytes + layout.section_count * SUM_BYTES
    head = encode_head(Kind.CHUNKS, number, length)
    link.channel.send_bytes([memoryview(head + encode_span(at, count))])
    send_run(link.channel, planes, at, count)


def pause(ends_s: float) -> None:
    """Waits a little for room in an arena. Raises Unavailable once the time is over."""
    if time.monotonic() > ends_s:
        raise Unavailable("the worker did not store what is in the shared memory in time: retry later")
    time.sleep(FULL_PAUSE_S)


def hear_why(link: Link) -> None:
    """A worker that refuses says why before it closes; raises BulkRefused if it did."""
    link.channel.limit(LAST_WORD_S, LAST_WORD_S)
    with suppress(Unavailable):
        link.receive(Kind.STORED)
