"""A put over a bulk connection: chunks are copied into the arena, or sent straight from the caller's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from kvstore.buffers import grouped
from kvstore.client.bulk.arena import Arena
from kvstore.client.bulk.cargo import ARENA_RUNS, Addresses, Cargo
from kvstore.client.bulk.copying import copy_rows
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.links import Link
from kvstore.errors import Unavailable
from kvstore.node.lanes import Deadline
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import (
    READY,
    RUN_BYTES_MAX,
    SPAN_BYTES,
    Kind,
    Placed,
    encode_head,
    encode_placed,
    encode_request,
    encode_span,
    unpacked,
)
from kvstore.wire.bulk.runs import SUM_BYTES
from kvstore.wire.messages import traced

FULL_PAUSE_S = 0.0005
"""Pause between two looks at a full arena."""
LAST_WORD_S = 1.0


def send_put(
    link: Link,
    start: pb.PutStart,
    cargo: Cargo,
    *,
    behind: bool,
    reserve: Callable[[int], int],
    idle_s: float,
    timeout_s: float,
    lanes: FileLanes,
) -> bytes:
    """Sends a put; returns the worker's encoded answer. ``start`` describes the cargo.

    ``reserve(bytes)`` returns how many of those bytes an arena may have. Raises LinkBroken, LinkLate, BulkRefused;
    InvalidRequest for an answer that makes no sense.
    """
    channel, ends_s = link.channel, time.monotonic() + timeout_s
    channel.limit(idle_s, timeout_s)
    first = 0 if start.keys else start.first
    size_bytes = cargo.size_bytes(first, cargo.count - first)
    link.share(size_bytes if behind else min(size_bytes, ARENA_RUNS * cargo.placed_bytes), reserve)
    arena, number = link.arena, link.next_number()
    while arena is not None and not arena.has_entry(number):
        if not channel.is_quiet():
            raise channel.break_off("the worker went away while chunks of earlier puts were in the arena")
        _pause(ends_s)
    # A put that does not fit into the arena as a whole must be stored while it is copied.
    behind = behind and (not link.is_shared or (arena is not None and arena.size_bytes >= size_bytes))
    channel.send(Kind.PUT, number, [encode_request(timeout_s, int(behind), traced(start))])
    begin, count, sent_bytes = unpacked(READY, link.receive(Kind.READY)[1])
    if count and not (first <= begin and begin + count == cargo.count):
        raise channel.break_off(f"chunks {begin} to {begin + count - 1} are wanted of {cargo.count}")
    run_bytes = 0 if arena is None else _placed_bytes(arena, cargo, cargo.size_bytes(begin, count), behind=behind)
    try:
        sizes = [cargo.size_bytes(index, 1) for index in range(begin, begin + count)]
        for run in grouped(sizes, run_bytes or min(sent_bytes, RUN_BYTES_MAX)):
            at, chunks = begin + run.start, run.stop - run.start
            if at > begin and not channel.is_quiet():
                break  # the worker has something to say: it refuses
            if arena is not None and run_bytes:
                _place(link, arena, number, cargo, begin, at, chunks, ends_s, lanes)
            else:
                _send(link, number, cargo, at, chunks)
        return link.receive(Kind.STORED)[1]
    except LinkBroken as broken:
        _hear_why(link)
        raise broken


def _placed_bytes(arena: Arena, cargo: Cargo, size_bytes: int, *, behind: bool) -> int:
    """Returns the size of runs in the arena for a put of ``size_bytes``; 0 if the arena is too small for any."""
    if behind:
        return size_bytes
    placed_bytes = min(cargo.placed_bytes, size_bytes)
    if arena.size_bytes >= size_bytes + placed_bytes:
        return placed_bytes
    # With room for fewer runs the worker would wait for the next run, and we for it to release one.
    placed_bytes = min(placed_bytes, arena.size_bytes // ARENA_RUNS)
    return placed_bytes if placed_bytes >= cargo.largest_bytes else 0


def _place(
    link: Link,
    arena: Arena,
    number: int,
    cargo: Cargo,
    begin: int,
    first: int,
    count: int,
    ends_s: float,
    lanes: FileLanes,
) -> None:
    size_bytes = cargo.size_bytes(first, count)
    while (offset := arena.take(size_bytes, number, first + count - begin)) is None:
        if not link.channel.is_quiet():
            return  # the caller reads the worker's answer
        _pause(ends_s)
    target, deadline = arena.bytes_at(offset, size_bytes), Deadline(lanes.clock, ends_s - time.monotonic())

    def copy(to: Addresses, source: Addresses, row_bytes: int, alive: object) -> None:
        copy_rows(to, source, row_bytes, alive, lanes.copiers(), deadline)

    cargo.place(first, count, target, copy)
    link.channel.send(Kind.PLACED, number, [encode_placed(Placed(first, count, offset))])


def _send(link: Link, number: int, cargo: Cargo, first: int, count: int) -> None:
    length = SPAN_BYTES + cargo.size_bytes(first, count) + cargo.sums_count(count) * SUM_BYTES
    link.channel.send_bytes([memoryview(encode_head(Kind.CHUNKS, number, length) + encode_span(first, count))])
    cargo.send(link.channel, first, count)


def _pause(ends_s: float) -> None:
    """Waits a little for room in an arena. Raises Unavailable once the time is over."""
    if time.monotonic() > ends_s:
        raise Unavailable("the worker did not store the chunks in shared memory in time: retry later")
    time.sleep(FULL_PAUSE_S)


def _hear_why(link: Link) -> None:
    """Raises BulkRefused if the worker said why it refused before it closed the connection."""
    link.channel.limit(LAST_WORD_S, LAST_WORD_S)
    with suppress(Unavailable):
        link.receive(Kind.STORED)
