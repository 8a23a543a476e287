"""Put: images of chunks or blocks arrive, are verified, and are written while the next arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kvstore.buffers import Buffers, Pieces, aligned, cut_evenly
from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.format.header import Expected
from kvstore.keyset import KeySet
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.writer import Written
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.images import receive_images
from kvstore.wire.limits import MESSAGE_BYTES_MAX
from kvstore.wire.messages import hints_of, write_of
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.calls import Call, Calls, seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.writes import RUNS_IN_MEMORY

RUN_BYTES = 4 << 20
"""A run is written once it has this many bytes, so it has at most that and one chunk."""


class PutStreams:
    """Serves Put."""

    def __init__(self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls

    def put(self, messages: Iterator[pb.PutRequest], context: Call) -> bytes:
        """Stores one stream of images as they arrive; returns the encoded answer."""
        opening = next(messages)
        start = opening.start
        wanted, first = self._prompts.to_put(start, context)

        def deadline() -> Deadline:
            return Deadline(self._node.clock, seconds_left(context, self._node.limits.write_deadline_s))

        sizes = wanted.payload_sizes()[first:]
        in_memory_bytes = min(sum(sizes), RUNS_IN_MEMORY * (RUN_BYTES + max(sizes, default=0)))
        with self._in_flight.reserved(in_memory_bytes + MESSAGE_BYTES_MAX):
            write = self._node.writer.begin(wanted, first, deadline(), hints_of(start.hints), write_of(start.write))
            try:
                if not write.refused:
                    for index, run in self._runs(wanted, first, itertools.chain([opening], messages)):
                        write.add(buffers_of(wanted, index, run), index, len(run), deadline())
            except BaseException:
                # The client is gone, or sent wrong or damaged bytes: only what was verified before may be published.
                write.abort()
                raise
            return put_answer(wanted, write.commit(deadline()))

    def _runs(
        self, wanted: KeySet, first: int, messages: Iterator[pb.PutRequest]
    ) -> Iterator[tuple[int, list[memoryview]]]:
        """Yields chunks in runs, each with its first index; a chunk is a buffer with its sections."""
        run: list[memoryview] = []
        run_bytes = 0

        def target(index: int) -> tuple[Expected, Pieces]:
            if index != first + len(run) or index >= len(wanted):
                raise InvalidRequest(
                    f"an image of {_unit(wanted)} {index} came: expected {first + len(run)}, of {len(wanted)}"
                )
            expected = wanted.expected(index)
            run.append(aligned(expected.payload_bytes))
            return expected, cut_evenly(run[-1], expected.section_bytes)

        for index in receive_images(messages, target):
            self._calls.add(WorkerCount.WIRE_BYTES_IN, len(run[-1]))
            run_bytes += len(run[-1])
            if run_bytes >= RUN_BYTES or index + 1 == len(wanted):
                yield first, run
                first, run, run_bytes = index + 1, [], 0
        if first < len(wanted):
            raise InvalidRequest(
                f"the stream ended before {_unit(wanted)} {first + len(run)}: expected all up to {len(wanted) - 1}"
            )


def put_answer(wanted: KeySet, written: Written) -> bytes:
    """Encodes the answer to a put."""
    result = written.of_prompt(wanted.namespace.layout.chunk_tokens)
    is_chain = wanted.prefix_ordered
    return pb.PutResponse(
        tokens_present=result.tokens_present if is_chain else 0,
        chunks_written=result.chunks_written,
        chunks_found=result.chunks_found,
        bytes_written=result.bytes_written,
        reason=result.reason,
        stored=b"" if is_chain else written.there.tobytes(),
    ).SerializeToString()


def buffers_of(wanted: KeySet, first: int, buffers: Sequence[memoryview]) -> Buffers:
    """The sections of chunks or blocks from index ``first`` on, in a buffer for each."""
    return Buffers(buffers, first, wanted.namespace.layout.section_bytes if wanted.prefix_ordered else None)


def _unit(wanted: KeySet) -> str:
    return "chunk" if wanted.prefix_ordered else "block"
