"""Put: chunks arrive in frames, are verified, and go to the root while the next arrive."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.address import Chain
from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.node import Node
from kvstore.results import PutResult
from kvstore.sections import Sections
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.frames import Frame
from kvstore.wire.limits import MESSAGE_BYTES_MAX
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.wire.parts import Incoming, SameSize
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.worker.writing import Writing, begin_writing
from kvstore.writes import WriteMode

RUNS_IN_FLIGHT = 3
"""One that is arriving and two on their way to the root (``Putting.add_run``)."""
RUN_BYTES = 4 << 20
"""What memory takes at once. To the root each chunk goes as soon as it is here."""


class PutStreams:
    """Serves Put."""

    def __init__(self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls

    def put(self, frames: Iterator[Frame], context: Call) -> bytes:
        """The encoded answer to one stream."""
        opening = next(frames)
        start = parse(pb.PutStart, opening.start or b"")
        chain = self._prompts.chain(start.namespace, start.tokens, context)
        if start.first > len(chain):
            raise InvalidRequest(
                f"first is {start.first}: expected at most {len(chain)}, the full chunks of the prompt"
            )
        hints, write = hints_of(start.hints), write_of(start.write)
        node, write_s, chunk_bytes = self._node, self._node.limits.write_deadline_s, chain.namespace.layout.chunk_bytes
        begin, matched, run = start.first, start.first, 1
        if node.puts.mode(write, hints) is WriteMode.BEHIND:
            # What is there is not put again, and what is not begins where that ends.
            matched = node.match(chain, seconds_left(context, node.limits.match_deadline_s))
            begin, run = max(begin, matched), max(1, RUN_BYTES // chunk_bytes)
        with self._in_flight.reserved(RUNS_IN_FLIGHT * run * chunk_bytes + MESSAGE_BYTES_MAX):
            putting = begin_writing(node, chain, begin, matched, hints, write, seconds_left(context, write_s))
            if not putting.refused:
                try:
                    self._store(putting, chain, start.first, begin, run, opening, frames, context)
                except BaseException:
                    # Gone, wrong or damaged: what came whole and verified until here may be published, nothing else.
                    putting.abandon()
                    raise
            return _answer(putting.finish(seconds_left(context, write_s)), begin - start.first)

    def _store(
        self,
        putting: Writing,
        chain: Chain,
        first: int,
        begin: int,
        run: int,
        opening: Frame,
        frames: Iterator[Frame],
        context: Call,
    ) -> None:
        """Stores chunks in runs, as they come from ``first`` on; those before ``begin`` are there."""
        layout = chain.namespace.layout
        incoming = Incoming(SameSize(layout.section_bytes, (len(chain) - first) * layout.section_count))
        sections: list[memoryview] = []
        waiting: list[list[memoryview]] = []
        index = first
        frame: Frame | None = opening
        while frame is not None:
            self._calls.add(WorkerCount.WIRE_BYTES_IN, len(frame.data))
            # A section is a view of the message it came in, which nobody changes: no copy, and no buffer to reuse.
            for section in incoming.feed(frame):
                sections.append(section)
                if len(sections) < layout.section_count:
                    continue
                if index >= begin:
                    waiting.append(sections)
                sections = []
                index += 1
                if len(waiting) == run or (waiting and index == len(chain)):
                    left_s = seconds_left(context, self._node.limits.write_deadline_s)
                    start = index - len(waiting)
                    putting.add_run(_source(waiting, start), start, len(waiting), left_s)
                    waiting = []
            frame = next(frames, None)
        if index < len(chain):
            raise InvalidRequest(
                f"the stream ended within chunk {index}: expected the {layout.chunk_bytes} bytes of each chunk from "
                f"{first} to {len(chain) - 1}"
            )


def _source(chunks: list[list[memoryview]], first: int) -> Sections:
    return lambda index: chunks[index - first]


def _answer(result: PutResult, found: int) -> bytes:
    return pb.PutResponse(
        tokens_present=result.tokens_present,
        chunks_written=result.chunks_written,
        chunks_found=result.chunks_found + found,
        bytes_written=result.bytes_written,
    ).SerializeToString()
