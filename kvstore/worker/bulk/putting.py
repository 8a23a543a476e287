"""Put over a bulk connection: chunks or blocks come in the shared arena or as bytes.

They are acknowledged when stored, or with ``write="behind"`` on receipt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.hints import Hints
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.wanted import Wanted
from kvstore.node.write import Write, Written
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import READY, Kind
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.worker.bulk.arriving import Arrived, Arriving
from kvstore.worker.bulk.cargo import Cargo
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.call import Call
from kvstore.worker.calls import seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.worker.puts_behind import PutsBehind
from kvstore.worker.putting import put_answer
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
    waits: bool
    """True if the client waits until the chunks are stored, false if only until they are received."""

    def released(self, count: int) -> None:
        """Tells the client that it may reuse the memory of its first ``count`` chunks."""
        if self.connection.ledger is not None:
            self.connection.ledger.released(self.number, count)


class BulkPuts:
    """Serves PUT frames."""

    def __init__(self, node: Node, prompts: Prompts, arriving: Arriving, behind: PutsBehind) -> None:
        self._node = node
        self._prompts = prompts
        self._arriving = arriving
        self._behind = behind

    def put(self, connection: Connection, number: int, flag: int, message: bytes, call: Call) -> None:
        """Answers one request about a prompt, or about engine-hashed blocks."""
        start = parse(pb.PutStart, message)
        wanted, first = self._prompts.to_put(start, call)
        hints, write = hints_of(start.hints), write_of(start.write)
        self._serve(_Request(connection, number, call, wanted, first, hints, write, waits=not flag))

    def _serve(self, request: _Request) -> None:
        """Asks for the missing chunks, stores them, and answers with the result."""
        channel, wanted = request.connection.channel, request.wanted
        write = self._node.puts.begin(
            wanted,
            request.first,
            self._deadline(request),
            request.hints,
            request.write or (None if request.waits else WriteMode.BEHIND),
            skips=True,
            sheds=request.waits,  # never shed a put behind: nobody waits for its result
        )
        first = write.first
        count = 0 if write.refused else len(wanted) - first
        cargo = Cargo(wanted, first, count, write.run_bytes)
        acknowledged = threading.Event()
        try:
            with ExitStack() as reserved:
                is_behind = (
                    not request.waits
                    and not self._node.durability.waits
                    and count > 0
                    and self._arriving.has_room(request.connection, cargo.all_bytes, reserved)
                )
                channel.send(Kind.READY, request.number, [READY.pack(first, count, cargo.run_bytes)])
                runs = self._arriving.runs(request.connection, cargo, write, reserved, is_behind=is_behind)
                if is_behind:
                    written = self._write_behind(request, write, cargo, self._all(write, runs), reserved, acknowledged)
                else:
                    written = self._store(request, write, cargo, runs, partial(self._deadline, request))
        except BaseException:
            # The client is gone, or sent wrong or damaged bytes: only what arrived whole before may be published.
            write.abandon()
            raise
        channel.send(Kind.STORED, request.number, [put_answer(wanted, written)])
        acknowledged.set()

    def _store(
        self, request: _Request, write: Write, cargo: Cargo, runs: Iterable[Arrived], deadline: Callable[[], Deadline]
    ) -> Written:
        """Stores chunks as they arrive."""
        for run in runs:
            if run.room is not None:
                write.fill(run.room)
                continue
            sections = cargo.sections(run.first, run.count, run.memory, run.sums)
            write.add(sections, run.first, run.count, deadline(), partial(self._release, request, cargo, run))
        written = write.finish(deadline())
        request.released(cargo.count)
        return written

    def _release(self, request: _Request, cargo: Cargo, run: Arrived) -> None:
        self._arriving.let_go(run)
        request.released(run.first + run.count - cargo.first)

    def _all(self, write: Write, runs: Iterable[Arrived]) -> list[Arrived]:
        """Waits for all runs, and stores those that are in memory as they come: claimed room, which nobody can read or
        evict, keeps others out. Returns the others.
        """
        left = list[Arrived]()
        for run in runs:
            if run.room is not None:
                write.fill(run.room)
            else:
                left.append(run)
        return left

    def _write_behind(
        self,
        request: _Request,
        write: Write,
        cargo: Cargo,
        runs: list[Arrived],
        reserved: ExitStack,
        acknowledged: threading.Event,
    ) -> Written:
        """Stores the chunks soon, from where they are; the answer tells which will be stored."""
        limit_s = self._node.limits.write_deadline_s
        kept = reserved.pop_all()

        def store() -> None:
            try:
                with kept:
                    self._store(request, write, cargo, runs, lambda: Deadline(self._node.clock, limit_s))
            except BaseException:
                write.abandon()
                raise
            finally:
                runs.clear()
                request.released(cargo.count)

        try:
            self._behind.submit(request.wanted.addresses[cargo.first :], store, acknowledged)
        except BaseException:
            kept.close()
            raise
        there = np.ones(len(request.wanted), np.bool_)
        fresh = np.arange(len(there)) >= cargo.first
        return Written(there, cargo.count, cargo.all_bytes, cargo.first - request.first, fresh)

    def _deadline(self, request: _Request) -> Deadline:
        return Deadline(self._node.clock, seconds_left(request.call, self._node.limits.write_deadline_s))
