"""Put and PutBlocks: chunks arrive in frames, are verified, and are written while the next arrive."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.address import Chain
from kvstore.buffers import Buffers, Sections
from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.puts import Written
from kvstore.node.wanted import Wanted, section_bytes, sizes_of
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.frames import Frame, Incoming, SameSize
from kvstore.wire.limits import MESSAGE_BYTES_MAX
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.writes import RUNS_IN_MEMORY

RUN_BYTES = 4 << 20
"""A run is written once it has this many bytes, so it has at most that and one chunk."""

Chunk = list[memoryview]
"""The sections of one chunk; a block has one section."""


class PutStreams:
    """Serves Put and PutBlocks."""

    def __init__(self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls

    def put(self, frames: Iterator[Frame], context: Call) -> bytes:
        """Stores one stream of chunks; returns the encoded answer."""
        opening = next(frames)
        start = parse(pb.PutStart, opening.start or b"")
        chain = self._prompts.chain_to_put(start, context)
        return chunks_answer(chain, self._store(chain, start.first, start, opening, frames, context))

    def put_blocks(self, frames: Iterator[Frame], context: Call) -> bytes:
        """Stores one stream of blocks; returns the encoded answer."""
        opening = next(frames)
        start = parse(pb.PutBlocksStart, opening.start or b"")
        blocks = self._prompts.blocks_to_put(start, context)
        return blocks_answer(self._store(blocks, 0, start, opening, frames, context))

    def _store(
        self,
        wanted: Wanted,
        first: int,
        start: pb.PutStart | pb.PutBlocksStart,
        opening: Frame,
        frames: Iterator[Frame],
        context: Call,
    ) -> Written:
        """Writes chunks as they arrive, from index ``first`` on."""

        def deadline() -> Deadline:
            return Deadline(self._node.clock, seconds_left(context, self._node.limits.write_deadline_s))

        sizes = sizes_of(wanted)[first:]
        in_memory_bytes = min(sum(sizes), RUNS_IN_MEMORY * (RUN_BYTES + max(sizes, default=0)))
        with self._in_flight.reserved(in_memory_bytes + MESSAGE_BYTES_MAX):
            write = self._node.puts.begin(wanted, first, deadline(), hints_of(start.hints), write_of(start.write))
            try:
                if not write.refused:
                    for index, run in self._runs(wanted, first, opening, frames):
                        write.add(_sections(wanted, index, run), index, len(run), deadline())
            except BaseException:
                # The client is gone, or sent wrong or damaged bytes: only what was verified before may be published.
                write.abandon()
                raise
            return write.finish(deadline())

    def _runs(
        self, wanted: Wanted, first: int, opening: Frame, frames: Iterator[Frame]
    ) -> Iterator[tuple[int, list[Chunk]]]:
        """Yields the chunks of a stream in runs, each with its first index."""
        if isinstance(wanted, Chain):
            per_chunk = wanted.namespace.layout.section_count
            incoming = Incoming(SameSize(section_bytes(wanted, first), (len(wanted) - first) * per_chunk))
        else:
            per_chunk, incoming = 1, Incoming(wanted.sizes_bytes)
        chunk: Chunk = []
        run: list[Chunk] = []
        index, run_bytes = first, 0
        frame: Frame | None = opening
        while frame is not None:
            self._calls.add(WorkerCount.WIRE_BYTES_IN, len(frame.data))
            # A section is a view of the message it came in, which nobody changes: no copy, and no buffer to reuse.
            for section in incoming.feed(frame):
                chunk.append(section)
                run_bytes += len(section)
                if len(chunk) < per_chunk:
                    continue
                run.append(chunk)
                chunk = []
                if run_bytes >= RUN_BYTES or index + len(run) == len(wanted):
                    yield index, run
                    index, run, run_bytes = index + len(run), [], 0
            frame = next(frames, None)
        if index < len(wanted):
            unit = "chunk" if isinstance(wanted, Chain) else "block"
            raise InvalidRequest(
                f"the stream ended within {unit} {index + len(run)}: expected the bytes of {unit}s {first} to "
                f"{len(wanted) - 1}"
            )


def _sections(wanted: Wanted, first: int, run: list[Chunk]) -> Sections:
    if isinstance(wanted, Chain):
        return lambda index: run[index - first]
    return Buffers([block for (block,) in run], first)


def chunks_answer(chain: Chain, written: Written) -> bytes:
    """Encodes the answer to a put of a prompt."""
    result = written.of_prompt(chain.namespace.layout.chunk_tokens)
    return pb.PutResponse(
        tokens_present=result.tokens_present,
        chunks_written=result.chunks_written,
        chunks_found=result.chunks_found,
        bytes_written=result.bytes_written,
        reason=result.reason,
    ).SerializeToString()


def blocks_answer(written: Written) -> bytes:
    """Encodes the answer to a put of blocks."""
    return pb.PutBlocksResponse(stored=written.there.tobytes(), reason=written.reason).SerializeToString()
