"""A put of engine-hashed blocks over a bulk connection: copied into the arena, or sent from where they are.

Apart from puts of prompts, because blocks have their own sizes, and each its own answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from kvstore.buffers import Pieces, byte_length
from kvstore.client.bulk.arena import Arena
from kvstore.client.bulk.copying import copy_rows
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.sending import RUNS_MIN, hear_why, pause
from kvstore.client.tools import FileLanes
from kvstore.node.deadline import Deadline
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import (
    RUN_BYTES_MAX,
    SPAN_BYTES,
    Kind,
    Placed,
    decode_span,
    encode_placed,
    encode_request,
    encode_span,
)
from kvstore.wire.bulk.sums import block_sums
from kvstore.wire.messages import parse
from kvstore.wire.traces import traced

PLACED_BYTES_MAX = 64 << 20
"""A run in the arena, while the next is copied. Each costs a hand-over, and one that is in the worker's memory is being
written to the root while we copy the next: on two cores runs of 8 MiB took four times as long.
"""


def send_blocks(
    link: Link,
    start: pb.PutBlocksStart,
    buffers: Pieces,
    *,
    deferred: bool,
    reserve: Callable[[int], int],
    idle_s: float,
    timeout_s: float,
    lanes: FileLanes,
) -> list[bool]:
    """For each block whether it is in the store now. ``start`` says which they are.

    ``reserve(bytes)`` says how many of so many bytes an arena may have.
    Raises LinkBroken, LinkLate, BulkRefused, InvalidRequest for what makes no sense.
    """
    channel, ends_s = link.channel, time.monotonic() + timeout_s
    channel.limit(idle_s, timeout_s)
    sizes = list(map(len, buffers))
    size_bytes, placed_bytes = sum(sizes), max(PLACED_BYTES_MAX, *sizes)
    link.share(size_bytes if deferred else min(size_bytes, RUNS_MIN * placed_bytes // 2), reserve)
    arena, number = link.arena, link.next_number()
    while arena is not None and not arena.has_entry(number):
        if not channel.is_quiet():
            raise channel.break_off("the worker went away while chunks of earlier puts were in the arena")
        pause(ends_s)
    # A put that does not fit into the arena as a whole has to be stored while it is copied.
    in_arena = arena is not None and arena.size_bytes >= size_bytes
    deferred = deferred and (in_arena or not link.is_shared)
    channel.send(Kind.PUT_BLOCKS, number, [encode_request(timeout_s, int(deferred), traced(start))])
    if decode_span(link.receive(Kind.READY)[1]) != (0, len(buffers)):
        raise channel.break_off(f"the worker does not want the {len(buffers)} blocks that it was told of")
    run_bytes = 0
    if arena is not None:
        run_bytes = size_bytes if deferred else min(placed_bytes, arena.size_bytes // (1 if in_arena else RUNS_MIN))
    if run_bytes < max(sizes):
        arena, run_bytes = None, RUN_BYTES_MAX  # the largest block does not fit
    try:
        for at, stop in _runs(sizes, run_bytes):
            if at and not channel.is_quiet():
                break  # it has something to say: that it refuses
            if arena is not None:
                _place(link, arena, number, at, buffers[at:stop], ends_s, lanes)
            else:
                _send(link, number, at, buffers[at:stop])
        _, answer = link.receive(Kind.STORED)
    except LinkBroken as broken:
        hear_why(link)
        raise broken
    stored = parse(pb.PutBlocksResponse, answer).stored
    if len(stored) != len(buffers):
        raise channel.break_off(f"the worker answered for {len(stored)} blocks of {len(buffers)}")
    return [bool(each) for each in stored]


def _runs(sizes: Sequence[int], bytes_max: int) -> Iterator[tuple[int, int]]:
    """First block of each run, and the one after its last: as many as fit into ``bytes_max``, or one."""
    ends, used = [0], 0
    for index, size in enumerate(sizes):
        if index > ends[-1] and used + size > bytes_max:
            ends.append(index)
            used = 0
        used += size
    return pairwise([*ends, len(sizes)])


def _place(link: Link, arena: Arena, number: int, at: int, blocks: Pieces, ends_s: float, lanes: FileLanes) -> None:
    size_bytes = byte_length(blocks)
    while (offset := arena.take(size_bytes, number, at + len(blocks))) is None:
        if not link.channel.is_quiet():
            return  # what it says is read by the caller
        pause(ends_s)
    sizes = np.fromiter(map(len, blocks), np.uint64, len(blocks))
    target = arena.bytes_at(offset, size_bytes)
    first: int = target.__array_interface__["data"][0]
    to = np.uint64(first) + np.cumsum(sizes) - sizes
    arrays = [np.frombuffer(block, np.uint8) for block in blocks]
    source = np.fromiter((each.__array_interface__["data"][0] for each in arrays), np.uint64, len(blocks))
    deadline = Deadline(lanes.clock, ends_s - time.monotonic())
    for size in np.unique(sizes):
        same = sizes == size
        copy_rows(to[same], source[same], int(size), (target, arrays), lanes.copiers(), deadline)
    link.channel.send(Kind.PLACED, number, [encode_placed(Placed(at, len(blocks), offset))])


def _send(link: Link, number: int, at: int, blocks: Pieces) -> None:
    channel = link.channel
    channel.send_head(Kind.CHUNKS, number, SPAN_BYTES + byte_length(blocks) + 8 * len(blocks))
    channel.send_bytes([memoryview(encode_span(at, len(blocks))), *blocks])
    channel.send_bytes([memoryview(np.array(block_sums(blocks), "<u8").tobytes())])
