"""Put over a bulk connection: chunks come in the shared arena or as bytes, and are acknowledged when they are stored;
or, deferred, when they are here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvstore.address import Chain
from kvstore.errors import InvalidRequest
from kvstore.node.node import Node
from kvstore.planes import Planes
from kvstore.results import PutResult
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import RUN_BYTES_MAX, SPAN_BYTES, Kind, decode_placed, decode_span, encode_span
from kvstore.wire.bulk.sums import plane_sums
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.wire.statuses import BrokenTransfer, Busy
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.bulk.deferred import Deferred
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.calls import CallContext, Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts
from kvstore.worker.writing import Writing, begin_writing
from kvstore.writes import WriteMode

RUNS_IN_FLIGHT = 3
"""Runs of one put that have memory: one that arrives and two on their way to the root (``Putting.add_run``)."""


@dataclass(slots=True)
class Arrived:
    """A run of chunks that is here: its planes; where it came as bytes, the checksum of each, and its buffer."""

    first: int
    count: int
    planes: Planes
    sums: tuple[int, ...] = ()
    buffer: bytearray | None = None


class BulkPuts:
    """Serves PUT frames."""

    def __init__(
        self,
        node: Node,
        prompts: Prompts,
        in_flight: BytesInFlight,
        calls: Calls,
        limits: WorkerLimits,
        buffers: Buffers,
        deferred: Deferred,
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits
        self._buffers = buffers
        self._deferred = deferred

    def put(self, connection: Connection, number: int, flag: int, message: bytes, context: CallContext) -> None:
        """Answers one request."""
        node, channel = self._node, connection.channel
        start = parse(pb.PutStart, message)
        chain = self._prompts.chain(start.namespace, start.tokens)
        if start.first > len(chain):
            raise InvalidRequest(
                f"first is {start.first}: expected at most {len(chain)}, the full chunks of the prompt"
            )
        hints = hints_of(start.hints)
        matched = node.match(chain, seconds_left(context, node.limits.match_deadline_s))
        first = max(start.first, matched)
        write = write_of(start.write) or (WriteMode.BEHIND if flag else None)
        write_s = seconds_left(context, node.limits.write_deadline_s)
        putting = begin_writing(node, chain, first, matched, hints, write, write_s)
        count = 0 if putting.refused else len(chain) - first
        with ExitStack() as reserved:
            is_deferred = bool(flag) and count > 0 and self._may_defer(connection, chain, count, reserved)
            try:
                channel.send(Kind.READY, number, [encode_span(first, count)])
                if is_deferred:
                    runs = list(self._arriving(connection, chain, first, reserved, is_deferred=True))
                else:
                    runs = self._store(connection, number, putting, chain, first, count, context, reserved)
            except BaseException:
                # Gone, wrong or damaged: what came whole until here may be published, nothing else.
                putting.abandon()
                raise
            if is_deferred:
                result = self._write_behind(connection, number, putting, chain, first, runs, reserved.pop_all())
            else:
                result = putting.finish(seconds_left(context, node.limits.write_deadline_s))
                self._let_go(runs)
                if connection.ledger is not None:
                    connection.ledger.released(number, count)
        channel.send(Kind.STORED, number, [_answer(result)])

    def _may_defer(self, connection: Connection, chain: Chain, count: int, reserved: ExitStack) -> bool:
        """Whether there is memory for all chunks of a put at once: the client's own, or ours, then reserved."""
        if connection.has_arena:
            return True
        size_bytes = count * chain.namespace.layout.chunk_bytes
        if size_bytes > self._limits.deferred_bytes_max:
            return False
        try:
            reserved.enter_context(self._in_flight.reserved(size_bytes))
        except Busy:
            return False
        return True

    def _write_behind(
        self,
        connection: Connection,
        number: int,
        putting: Writing,
        chain: Chain,
        first: int,
        runs: list[Arrived],
        reserved: ExitStack,
    ) -> PutResult:
        """Has the chunks written soon, or copied into memory from where they are; the answer says what will be so."""
        ledger, write_s, count = connection.ledger, self._node.limits.write_deadline_s, len(chain) - first

        def write() -> None:
            try:
                with reserved:
                    try:
                        for run in runs:
                            self._verify(run)
                            putting.add_run(run.planes, run.first, run.count, write_s)
                    except BaseException:
                        putting.abandon()
                        raise
                    putting.finish(write_s)
                    self._let_go(runs)
            finally:
                runs.clear()
                if ledger is not None:
                    ledger.released(number, count)

        try:
            self._deferred.submit(chain.addresses[first:], write)
        except BaseException:
            putting.abandon()
            reserved.close()
            raise
        layout = chain.namespace.layout
        return PutResult(len(chain) * layout.chunk_tokens, count, 0, count * layout.chunk_bytes)

    def _store(
        self,
        connection: Connection,
        number: int,
        putting: Writing,
        chain: Chain,
        first: int,
        count: int,
        context: CallContext,
        reserved: ExitStack,
    ) -> list[Arrived]:
        """Stores chunks as they come; returns the runs that may not be on the root yet."""
        in_use: list[Arrived] = []
        if not count:
            return in_use
        for run in self._arriving(connection, chain, first, reserved):
            self._verify(run)
            left_s = seconds_left(context, self._node.limits.write_deadline_s)
            putting.add_run(run.planes, run.first, run.count, left_s)
            in_use.append(run)
            if len(in_use) == RUNS_IN_FLIGHT:
                # The one before the last two is on the root: ``add_run`` waited for it.
                done = in_use.pop(0)
                self._let_go([done])
                if connection.ledger is not None:
                    connection.ledger.released(number, done.first + done.count - first)
        return in_use

    def _arriving(
        self, connection: Connection, chain: Chain, first: int, reserved: ExitStack, *, is_deferred: bool = False
    ) -> Iterator[Arrived]:
        """The runs of a client from chunk ``first`` on, in order.

        Memory for RUNS_IN_FLIGHT of the largest is reserved when the first comes as bytes. That of a deferred put was
        before, or is the client's own: then nothing may come as bytes.
        """
        channel, layout = connection.channel, chain.namespace.layout
        sums = struct.Struct(f"<{layout.section_count}Q")
        kinds = (Kind.PLACED,) if is_deferred and connection.has_arena else (Kind.PLACED, Kind.CHUNKS)
        is_reserved = is_deferred
        index = first
        while index < len(chain):
            head = channel.receive_head()
            channel.expect(head, *kinds)
            if head.kind is Kind.PLACED:
                placed = decode_placed(channel.receive(head.length))
                start, count, offset = placed.first, placed.count, placed.offset
            else:
                start, count = decode_span(channel.receive(SPAN_BYTES))
                offset = 0
            if start != index or not 1 <= count <= len(chain) - index:
                raise channel.break_off(f"{count} chunks from {start} on came: expected {index} and following")
            size_bytes = count * layout.chunk_bytes
            buffer: bytearray | None = None
            table: tuple[int, ...] = ()
            if head.kind is Kind.PLACED:
                memory = connection.placed(offset, size_bytes)
            else:
                if head.length != SPAN_BYTES + size_bytes + sums.size or (count > 1 and size_bytes > RUN_BYTES_MAX):
                    raise channel.break_off(f"{count} chunks say {head.length} bytes: that is not, or too large a run")
                if not is_reserved:
                    most = max(count, min(len(chain) - index, RUN_BYTES_MAX // layout.chunk_bytes))
                    reserved.enter_context(self._in_flight.reserved(RUNS_IN_FLIGHT * most * layout.chunk_bytes))
                    is_reserved = True
                buffer = self._buffers.take(size_bytes)
                memory = memoryview(buffer)
                channel.receive_into([memory])
                table = sums.unpack(channel.receive(sums.size))
            self._calls.add("wire_bytes_in", size_bytes)
            array = np.frombuffer(memory, np.uint8).reshape(layout.layers, 2, -1)
            yield Arrived(start, count, Planes(array, layout.section_bytes, start), table, buffer)
            index += count

    def _verify(self, run: Arrived) -> None:
        if run.sums and run.sums != plane_sums(run.planes, run.first, run.count):
            raise BrokenTransfer(
                f"chunks {run.first} to {run.first + run.count - 1} do not match their checksums: bytes changed on the "
                "way; repeat the call"
            )

    def _let_go(self, runs: list[Arrived]) -> None:
        for run in runs:
            buffer, run.buffer = run.buffer, None
            if buffer is not None:
                self._buffers.give(buffer)


def _answer(result: PutResult) -> bytes:
    return pb.PutResponse(
        tokens_present=result.tokens_present,
        chunks_written=result.chunks_written,
        chunks_found=result.chunks_found,
        bytes_written=result.bytes_written,
    ).SerializeToString()
