"""Put: chunks arrive in frames, are verified, and go to the root while the next arrive."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from kvstore.address import Chain
from kvstore.errors import InvalidRequest
from kvstore.node.node import Node
from kvstore.node.putting import Putting
from kvstore.results import PutResult
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.frames import Frame
from kvstore.wire.limits import MESSAGE_BYTES_MAX
from kvstore.wire.messages import hints_of, parse
from kvstore.wire.parts import Incoming, SameSize
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.prompts import Prompts

CHUNKS_IN_FLIGHT = 3
"""One that is arriving and two on their way to the root (``Putting.add``)."""


class PutStreams:
    """Serves Put."""

    def __init__(self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls

    def put(self, frames: Iterator[Frame], context: grpc.ServicerContext) -> bytes:
        """The encoded answer to one stream."""
        opening = next(frames)
        start = parse(pb.PutStart, opening.start or b"")
        chain = self._prompts.chain(start.namespace, start.tokens)
        if start.first > len(chain):
            raise InvalidRequest(
                f"first is {start.first}: expected at most {len(chain)}, the full chunks of the prompt"
            )
        hints = hints_of(start.hints)
        write_s = self._node.limits.write_deadline_s
        with self._in_flight.reserved(CHUNKS_IN_FLIGHT * chain.namespace.layout.chunk_bytes + MESSAGE_BYTES_MAX):
            putting = self._node.begin_put(chain, start.first, seconds_left(context, write_s), hints)
            if not putting.refused:
                try:
                    self._store(putting, chain, start.first, opening, frames, context)
                except BaseException:
                    # Gone, wrong or damaged: what came whole and verified until here may be published, nothing else.
                    putting.abandon()
                    raise
            return _answer(putting.finish(seconds_left(context, write_s)))

    def _store(
        self,
        putting: Putting,
        chain: Chain,
        first: int,
        opening: Frame,
        frames: Iterator[Frame],
        context: grpc.ServicerContext,
    ) -> None:
        layout = chain.namespace.layout
        incoming = Incoming(SameSize(layout.section_bytes, (len(chain) - first) * layout.section_count))
        sections: list[memoryview] = []
        index = first
        frame: Frame | None = opening
        while frame is not None:
            self._calls.add("wire_bytes_in", len(frame.data))
            # A section is a view of the message it came in, which nobody changes: no copy, and no buffer to reuse.
            for section in incoming.feed(frame):
                sections.append(section)
                if len(sections) == layout.section_count:
                    putting.add(index, sections, seconds_left(context, self._node.limits.write_deadline_s))
                    sections = []
                    index += 1
            frame = next(frames, None)
        if index < len(chain):
            raise InvalidRequest(
                f"the stream ended within chunk {index}: expected the {layout.chunk_bytes} bytes of each chunk from "
                f"{first} to {len(chain) - 1}"
            )


def _answer(result: PutResult) -> bytes:
    return pb.PutResponse(
        tokens_present=result.tokens_present,
        chunks_written=result.chunks_written,
        chunks_found=result.chunks_found,
        bytes_written=result.bytes_written,
    ).SerializeToString()
