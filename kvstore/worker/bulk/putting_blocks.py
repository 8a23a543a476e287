"""Put of engine-hashed blocks over a bulk connection: each run is stored as it comes, or, deferred, when all are here.

Apart from puts of prompts, because blocks have no parents: none waits for another, and each has an answer of its own.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import accumulate

from kvstore.hints import Hints
from kvstore.node.deadline import Deadline
from kvstore.node.node import Node
from kvstore.node.wanted import Keyed
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import RUN_BYTES_MAX, Kind, encode_span
from kvstore.wire.bulk.sums import block_sums
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.wire.statuses import BrokenTransfer
from kvstore.worker.bulk.arriving import Arrived, Arriving, Cargo
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.bulk.deferred import Deferred
from kvstore.worker.call import Call
from kvstore.worker.calls import seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.writes import WriteMode


class BlockPuts:
    """Serves PUT_BLOCKS frames."""

    def __init__(self, node: Node, prompts: Prompts, arriving: Arriving, deferred: Deferred) -> None:
        self._node = node
        self._prompts = prompts
        self._arriving = arriving
        self._deferred = deferred

    def put(self, connection: Connection, number: int, flag: int, message: bytes, context: Call) -> None:
        """Answers one request."""
        channel, start = connection.channel, parse(pb.PutBlocksStart, message)
        wanted = self._prompts.blocks(start.namespace, start.keys, start.sizes, context)
        hints = hints_of(start.hints)
        write = write_of(start.write) or (WriteMode.BEHIND if flag else None)
        # Before the bytes come: a root that is full takes none of them.
        self._node.gc_view.check_room()
        count, cargo = len(wanted), _cargo(wanted)
        acknowledged = threading.Event()
        with ExitStack() as reserved:
            size_bytes = cargo.size_bytes(0, count)
            is_deferred = bool(flag) and count > 0 and self._arriving.may_defer(connection, size_bytes, reserved)
            channel.send(Kind.READY, number, [encode_span(0, count)])
            arriving = self._arriving.runs(connection, cargo, 0, reserved, is_deferred=is_deferred)
            if is_deferred:
                runs, kept = list(arriving), reserved.pop_all()
                stored = self._write_behind(connection, number, wanted, runs, hints, write, kept, acknowledged)
            else:
                stored = []
                for run in arriving:
                    left_s = seconds_left(context, self._node.limits.write_deadline_s)
                    stored += self._store(wanted, run, hints, write, left_s)
                    if connection.ledger is not None:
                        connection.ledger.released(number, run.first + run.count)
        channel.send(Kind.STORED, number, [pb.PutBlocksResponse(stored=bytes(stored)).SerializeToString()])
        acknowledged.set()

    def _store(
        self, wanted: Keyed, run: Arrived, hints: Hints, write: WriteMode | None, left_s: float, *, sheds: bool = True
    ) -> list[bool]:
        """Stores one run, whose memory is free then; for each of its blocks whether it is in the store now."""
        node, buffers = self._node, _verified(wanted, run)

        def put(places: list[int], mode: WriteMode | None) -> list[bool]:
            keys = [wanted.keys[run.first + at] for at in places]
            deadline, part = Deadline(node.clock, left_s), [buffers[at] for at in places]
            return node.blocks.put(wanted.namespace, keys, part, deadline, node.durable, hints, mode)

        stored = put([*range(run.count)], write)
        left = [at for at, there in enumerate(stored) if not there]
        if left and not sheds:
            # Who does not wait for it wants it stored: on the root, where memory has no room for it.
            put(left, WriteMode.AROUND)
        self._arriving.let_go(run)
        return stored

    def _write_behind(
        self,
        connection: Connection,
        number: int,
        wanted: Keyed,
        runs: list[Arrived],
        hints: Hints,
        write: WriteMode | None,
        reserved: ExitStack,
        acknowledged: threading.Event,
    ) -> list[bool]:
        """Has the blocks stored soon, from where they are; the answer says what will be so."""
        ledger, write_s, count = connection.ledger, self._node.limits.write_deadline_s, len(wanted)

        def store() -> None:
            try:
                with reserved:
                    for run in runs:
                        self._store(wanted, run, hints, write, write_s, sheds=False)
            finally:
                runs.clear()
                if ledger is not None:
                    ledger.released(number, count)

        try:
            self._deferred.submit(wanted.addresses, store, acknowledged)
        except BaseException:
            reserved.close()
            raise
        return [True] * count


def _cargo(wanted: Keyed) -> Cargo:
    """The blocks of a put."""
    ends = [0, *accumulate(wanted.sizes_bytes)]
    # One run at a time is here: it is stored before the next is received.
    most = min(ends[-1], max(RUN_BYTES_MAX, *wanted.sizes_bytes, 0))
    return Cargo(len(wanted), lambda first, count: ends[first + count] - ends[first], lambda count: count, most)


def _verified(wanted: Keyed, run: Arrived) -> list[memoryview]:
    """The blocks of a run. Raises BrokenTransfer where they do not match their checksums."""
    buffers: list[memoryview] = []
    at = 0
    for size in wanted.sizes_bytes[run.first : run.first + run.count]:
        buffers.append(run.memory[at : at + size])
        at += size
    if run.sums and run.sums != block_sums(buffers):
        raise BrokenTransfer(
            f"blocks {run.first} to {run.first + run.count - 1} do not match their checksums: bytes changed on the "
            "way; repeat the call"
        )
    return buffers
