"""Answers to WANT: chunks that a client on this host reads itself, in mapped memory or in open files.

The client verifies: it gets whole files, or images of them, with their headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from kvstore.address import Chain
from kvstore.counts import NodeCount
from kvstore.errors import InvalidRequest
from kvstore.node.deadline import Deadline
from kvstore.node.node import Node
from kvstore.node.slots import Slots
from kvstore.root.posix_reader import PosixReader
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import FILES_MAX, Given, Kind, decode_span, encode_slots, encode_span
from kvstore.worker.bulk.asked import Asked
from kvstore.worker.bulk.leases import Lease, Leases
from kvstore.worker.calls import seconds_left
from kvstore.worker.context import CallContext

KEEP = 1
"""First byte of READ if the client goes on reading its leased slots."""


class HandingOver:
    """One request of mode FILES or SLOTS for ``count`` chunks or blocks; without ``leases`` it gets no slots."""

    def __init__(self, channel: Channel, number: int, count: int, leases: Leases | None) -> None:
        self._channel = channel
        self._number = number
        self._count = count
        self._leases = leases
        self._lease: Lease | None = None

    def serve(self, answer: Callable[[int, int], object]) -> int:
        """Answers each WANT by ``answer(first, count)``; returns how many chunks the client says it has read."""
        with self._leasing() as leasing:
            while True:
                head, payload = self._channel.receive_frame(Kind.WANT, Kind.READ)
                first, wanted = decode_span(payload)
                if head.kind is Kind.READ:
                    leasing.append(first != KEEP)
                    return min(wanted, self._count)
                if not 1 <= wanted <= FILES_MAX or first + wanted > self._count:
                    raise InvalidRequest(
                        f"files of chunks {first} to {first + wanted - 1} were asked for: only {self._count} are held"
                    )
                answer(first, wanted)

    def lease(self, slots: Slots) -> bool:
        """Leases the chunks in ``slots`` to the client; True if the lease is granted.

        False if there are too many leases or too much is leased: ``slots`` is then the caller's to release.
        """
        if self._leases is None or (lease := self._lease or self._leases.begin()) is None:
            return False
        self._lease = lease
        return self._leases.add(lease, slots)

    def send_slots(self, first: int, offsets: Sequence[int]) -> None:
        """Tells the client the offsets of leased chunks."""
        assert self._lease is not None
        given = encode_slots(Given(first, tuple(offsets)))
        self._channel.send(Kind.SLOTS, self._number, [given], self._lease.hand())
        self._lease.handed_over()

    def send_files(self, first: int, readers: Sequence[PosixReader]) -> None:
        """Hands over open files; the caller still closes them."""
        files = [reader.fileno() for reader in readers]
        self._channel.send(Kind.FILES, self._number, [encode_span(first, len(files))], files)

    @contextmanager
    def _leasing(self) -> Iterator[list[bool]]:
        """Holds a lease during the request. It ends here if the client said that it is done, else with the client.

        A client that missed our deadline may still be reading.
        """
        done: list[bool] = []
        try:
            yield done
        finally:
            lease, self._lease = self._lease, None
            if lease is not None and self._leases is not None:
                if done == [True]:
                    self._leases.end(lease)
                else:
                    self._leases.keep(lease)


class ImageHanding:
    """One GET or GET_BLOCKS of mode FILES or SLOTS, after START."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        asked: Asked,
        count: int,
        leases: Leases | None,
        context: CallContext,
    ) -> None:
        """``leases`` is None for a client that only gets files."""
        self._node = node
        self._channel = channel
        self._number = number
        self._asked = asked
        self._wanted = asked.wanted
        self._is_chain = isinstance(asked.wanted, Chain)
        self._context = context
        self._handing = HandingOver(channel, number, count, leases)
        self._has_slots = leases is not None
        self.given: list[int] = []
        """Indexes of the chunks that were handed over."""
        self.in_memory: set[int] = set()
        """Those of them that were in memory; the others were files."""

    def serve(self) -> int:
        """Hands over what the client wants; returns how many chunks it says it has read."""
        return self._handing.serve(self._answer)

    def _answer(self, first: int, count: int) -> None:
        """Answers one WANT: a frame for each run of chunks that can be had in the same way, or not at all."""
        handing, deadline = self._node.handing, Deadline(self._node.clock, self._left_s())
        indexes = range(first, first + count)
        allowed = self._asked.allowed(self._node, indexes)
        how = dict.fromkeys(indexes, Kind.ABSENT)
        offsets: dict[int, int] = {}
        readers: dict[int, PosixReader] = {}
        slots = self._found(allowed, deadline)
        try:
            there = _there(allowed, slots)
            if there and slots is not None and self._handing.lease(slots):
                slots, offsets = None, there
                self._node.counters.add(NodeCount.MEMORY_HITS, len(there))
                self.in_memory.update(there)
            left = [index for index in allowed if index not in offsets]
            if left and self._node.hands_files and not self._asked.memory_only:
                readers = handing.open_files(self._wanted, left, deadline)
                left = [
                    index
                    for index in left
                    if index not in readers and (index in there or handing.is_elsewhere(self._wanted, index))
                ]
            # A root without files to hand over cannot tell here whether it has the chunk.
            how.update(dict.fromkeys(left, Kind.ELSEWHERE))
            how.update(dict.fromkeys(offsets, Kind.SLOTS))
            how.update(dict.fromkeys(readers, Kind.FILES))
            for kind, run in groupby(how, how.__getitem__):
                if not self._send(kind, list(run), offsets, readers):
                    break
        finally:
            if slots is not None:
                slots.release()
            for reader in readers.values():
                reader.close()

    def _found(self, allowed: Sequence[int], deadline: Deadline) -> Slots | None:
        """Returns the chunks in memory. None for a prompt whose client takes files only."""
        if not allowed or (self._is_chain and not self._has_slots):
            return None
        return self._node.handing.in_memory(self._wanted, allowed, deadline, brings=not self._asked.memory_only)

    def _send(self, kind: Kind, run: list[int], offsets: dict[int, int], readers: dict[int, PosixReader]) -> bool:
        """Tells the client how to get a run of chunks; returns whether anything may follow it."""
        if kind is Kind.SLOTS:
            self._handing.send_slots(run[0], [offsets[index] for index in run])
        elif kind is Kind.FILES:
            self._handing.send_files(run[0], [readers[index] for index in run])
        else:
            self._channel.send(kind, self._number, [encode_span(run[0], len(run))])
            return not self._is_chain
        self.given += run
        return True

    def _left_s(self) -> float:
        return seconds_left(self._context, self._node.limits.read_deadline_s)


def _there(indexes: Sequence[int], slots: Slots | None) -> dict[int, int]:
    """Returns the offsets of the chunks that are in memory."""
    entries = slots.entries if slots is not None else []
    return {index: entry.offset for index, entry in zip(indexes, entries, strict=False) if entry is not None}
