"""Put over a bulk connection: chunks come in the shared arena or as bytes, and are acknowledged when they are stored;
or, deferred, when they are here.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np

from kvstore.address import Chain
from kvstore.errors import InvalidRequest
from kvstore.node.node import Node
from kvstore.results import PutResult
from kvstore.sections import Planes
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import RUN_BYTES_MAX, Kind, encode_span
from kvstore.wire.bulk.sums import plane_sums
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.wire.statuses import BrokenTransfer
from kvstore.worker.bulk.arriving import Arrived, Arriving, Cargo
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.bulk.deferred import Deferred
from kvstore.worker.call import Call
from kvstore.worker.calls import seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.worker.writing import Writing, begin_writing
from kvstore.writes import WriteMode

RUNS_IN_FLIGHT = 3
"""Runs of one put that have memory: one that arrives and two on their way to the root (``Putting.add_run``)."""


class BulkPuts:
    """Serves PUT frames."""

    def __init__(
        self,
        node: Node,
        prompts: Prompts,
        arriving: Arriving,
        deferred: Deferred,
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._arriving = arriving
        self._deferred = deferred

    def put(self, connection: Connection, number: int, flag: int, message: bytes, context: Call) -> None:
        """Answers one request."""
        node, channel = self._node, connection.channel
        start = parse(pb.PutStart, message)
        chain = self._prompts.chain(start.namespace, start.tokens, context)
        if start.first > len(chain):
            raise InvalidRequest(
                f"first is {start.first}: expected at most {len(chain)}, the full chunks of the prompt"
            )
        hints = hints_of(start.hints)
        matched = node.match(chain, seconds_left(context, node.limits.match_deadline_s))
        first = max(start.first, matched)
        write = write_of(start.write) or (WriteMode.BEHIND if flag else None)
        write_s = seconds_left(context, node.limits.write_deadline_s)
        sheds = not flag  # who does not wait for it wants it stored, however long that takes
        putting = begin_writing(node, chain, first, matched, hints, write, write_s, sheds=sheds)
        if putting.refused and first > start.first:
            # Peers or the local disk have what was matched, and neither the root nor memory: all of it has to come.
            putting.abandon()
            first = start.first
            putting = begin_writing(node, chain, first, matched, hints, write, write_s, sheds=sheds)
        count = 0 if putting.refused else len(chain) - first
        acknowledged = threading.Event()
        with ExitStack() as reserved:
            size_bytes = count * chain.namespace.layout.chunk_bytes
            is_deferred = bool(flag) and count > 0 and self._arriving.may_defer(connection, size_bytes, reserved)
            try:
                channel.send(Kind.READY, number, [encode_span(first, count)])
                if is_deferred:
                    cargo = _cargo(chain, first)
                    runs = list(self._arriving.runs(connection, cargo, first, reserved, is_deferred=True))
                else:
                    runs = self._store(connection, number, putting, chain, first, count, context, reserved)
            except BaseException:
                # Gone, wrong or damaged: what came whole until here may be published, nothing else.
                putting.abandon()
                raise
            if is_deferred:
                kept = reserved.pop_all()
                result = self._write_behind(connection, number, putting, chain, first, runs, kept, acknowledged)
            else:
                result = putting.finish(seconds_left(context, node.limits.write_deadline_s))
                self._arriving.let_go(*runs)
                if connection.ledger is not None:
                    connection.ledger.released(number, count)
        channel.send(Kind.STORED, number, [_answer(result)])
        acknowledged.set()

    def _write_behind(
        self,
        connection: Connection,
        number: int,
        putting: Writing,
        chain: Chain,
        first: int,
        runs: list[Arrived],
        reserved: ExitStack,
        acknowledged: threading.Event,
    ) -> PutResult:
        """Has the chunks written soon, or copied into memory from where they are; the answer says what will be so."""
        ledger, write_s, count = connection.ledger, self._node.limits.write_deadline_s, len(chain) - first

        def write() -> None:
            try:
                with reserved:
                    try:
                        for run in runs:
                            putting.add_run(_verified(chain, run), run.first, run.count, write_s)
                    except BaseException:
                        putting.abandon()
                        raise
                    putting.finish(write_s)
                    self._arriving.let_go(*runs)
            finally:
                runs.clear()
                if ledger is not None:
                    ledger.released(number, count)

        try:
            self._deferred.submit(chain.addresses[first:], write, acknowledged)
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
        context: Call,
        reserved: ExitStack,
    ) -> list[Arrived]:
        """Stores chunks as they come; returns the runs that may not be on the root yet."""
        in_use: list[Arrived] = []
        if not count:
            return in_use
        for run in self._arriving.runs(connection, _cargo(chain, first), first, reserved):
            planes = _verified(chain, run)
            left_s = seconds_left(context, self._node.limits.write_deadline_s)
            putting.add_run(planes, run.first, run.count, left_s)
            in_use.append(run)
            if len(in_use) == RUNS_IN_FLIGHT:
                # The one before the last two is on the root: ``add_run`` waited for it.
                done = in_use.pop(0)
                self._arriving.let_go(done)
                if connection.ledger is not None:
                    connection.ledger.released(number, done.first + done.count - first)
        return in_use


def _cargo(chain: Chain, first: int) -> Cargo:
    """The chunks of a prompt from ``first`` on."""
    layout = chain.namespace.layout
    most = max(1, min(len(chain) - first, RUN_BYTES_MAX // layout.chunk_bytes))
    return Cargo(
        len(chain),
        lambda _, count: count * layout.chunk_bytes,
        lambda _: layout.section_count,
        RUNS_IN_FLIGHT * most * layout.chunk_bytes,
    )


def _verified(chain: Chain, run: Arrived) -> Planes:
    """The chunks of a run. Raises BrokenTransfer where they do not match their checksums."""
    layout = chain.namespace.layout
    array = np.frombuffer(run.memory, np.uint8).reshape(layout.layers, 2, -1)
    planes = Planes(array, layout.section_bytes, run.first)
    if run.sums and run.sums != plane_sums(planes, run.first, run.count):
        raise BrokenTransfer(
            f"chunks {run.first} to {run.first + run.count - 1} do not match their checksums: bytes changed on the "
            "way; repeat the call"
        )
    return planes


def _answer(result: PutResult) -> bytes:
    return pb.PutResponse(
        tokens_present=result.tokens_present,
        chunks_written=result.chunks_written,
        chunks_found=result.chunks_found,
        bytes_written=result.bytes_written,
    ).SerializeToString()
