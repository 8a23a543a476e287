"""Put over a bulk connection: chunks or blocks come in the shared arena or as bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvstore.hints import Hints
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.wanted import Wanted
from kvstore.node.write import Written
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import READY, Kind
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.worker.bulk.arriving import Arrived, Arriving
from kvstore.worker.bulk.cargo import Cargo
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.call import Call
from kvstore.worker.calls import seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.worker.putting import blocks_answer, chunks_answer
from kvstore.writes import WriteMode


@dataclass(frozen=True, slots=True)
class _Request:
    """One put of a client."""

    connection: Connection
    number: int
    call: Call
    wanted: Wanted
    first: int
    hints: Hints
    write: WriteMode | None

    def released(self, count: int) -> None:
        """Tells the client that it may reuse the memory of its first ``count`` chunks."""
        if self.connection.ledger is not None:
            self.connection.ledger.released(self.number, count)


class BulkPuts:
    """Serves PUT and PUT_BLOCKS frames."""

    def __init__(self, node: Node, prompts: Prompts, arriving: Arriving) -> None:
        self._node = node
        self._prompts = prompts
        self._arriving = arriving

    def put(self, connection: Connection, number: int, message: bytes, call: Call) -> None:
        """Answers one request about a prompt."""
        start = parse(pb.PutStart, message)
        chain = self._prompts.chain_to_put(start, call)
        hints, write = hints_of(start.hints), write_of(start.write)
        request = _Request(connection, number, call, chain, start.first, hints, write)
        self._serve(request, partial(chunks_answer, chain))

    def put_blocks(self, connection: Connection, number: int, message: bytes, call: Call) -> None:
        """Answers one request about engine-hashed blocks."""
        start = parse(pb.PutBlocksStart, message)
        blocks = self._prompts.blocks_to_put(start, call)
        hints, write = hints_of(start.hints), write_of(start.write)
        self._serve(_Request(connection, number, call, blocks, 0, hints, write), blocks_answer)

    def _serve(self, request: _Request, answer: Callable[[Written], bytes]) -> None:
        """Asks for the missing chunks, stores them as they arrive, and answers with the result."""
        channel, wanted = request.connection.channel, request.wanted
        write = self._node.puts.begin(
            wanted, request.first, self._deadline(request), request.hints, request.write, skips=True
        )
        first = write.first
        cargo = Cargo(wanted, first, 0 if write.refused else len(wanted) - first)
        try:
            with ExitStack() as reserved:
                channel.send(Kind.READY, request.number, [READY.pack(first, cargo.count, cargo.run_bytes)])
                for run in self._arriving.runs(request.connection, cargo, reserved):
                    sections = cargo.sections(run.first, run.count, run.memory)
                    release = partial(self._release, request, cargo, run)
                    write.add(sections, run.first, run.count, self._deadline(request), release)
                written = write.finish(self._deadline(request))
        except BaseException:
            # The client is gone, or sent wrong or damaged bytes: only what arrived whole before may be published.
            write.abandon()
            raise
        request.released(cargo.count)
        channel.send(Kind.STORED, request.number, [answer(written)])

    def _release(self, request: _Request, cargo: Cargo, run: Arrived) -> None:
        self._arriving.let_go(run)
        request.released(run.first + run.count - cargo.first)

    def _deadline(self, request: _Request) -> Deadline:
        return Deadline(self._node.clock, seconds_left(request.call, self._node.limits.write_deadline_s))
