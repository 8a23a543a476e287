"""Answers to WANT: chunks that a client on this host reads itself, in mapped memory or in open files.

The client verifies: it gets whole files, or images of them, with their headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvstore.address import Chain
from kvstore.errors import InvalidRequest
from kvstore.node.handing import Asked
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.slots import Slots
from kvstore.root.posix_reader import PosixReader
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import FILES_MAX, Given, Kind, decode_span, encode_slots, encode_span
from kvstore.worker.bulk.leases import Lease, Leases
from kvstore.worker.call import CallContext
from kvstore.worker.calls import seconds_left

KEEP = 1
"""First byte of READ if the client goes on reading its leased slots."""


class ImageHanding:
    """One GET of mode FILES or SLOTS, after START."""

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
        """It is about ``count`` chunks; ``leases`` is None for a client that gets files alone."""
        self._node = node
        self._channel = channel
        self._number = number
        self._count = count
        self._asked = asked
        self._wanted = asked.wanted
        self._is_chain = isinstance(asked.wanted, Chain)
        self._context = context
        self._leases = leases
        self._lease: Lease | None = None
        self.given: list[int] = []
        """Indexes of the chunks that were handed over."""
        self.in_memory: set[int] = set()
        """Those of them that were in memory; the others were files."""

    def serve(self) -> int:
        """Hands over what the client wants until it says how many chunks it read, which this returns."""
        is_done = False
        try:
            while True:
                head, payload = self._channel.receive_frame(Kind.WANT, Kind.READ)
                first, wanted = decode_span(payload)
                if head.kind is Kind.READ:
                    is_done = first != KEEP
                    return min(wanted, self._count)
                if not 1 <= wanted <= FILES_MAX or first + wanted > self._count:
                    raise InvalidRequest(
                        f"files of chunks {first} to {first + wanted - 1} were asked for: only {self._count} are held"
                    )
                self._answer(first, wanted)
        finally:
            lease, self._lease = self._lease, None
            if lease is not None and self._leases is not None:
                # Without its word, the lease ends with the client: one that we waited for in vain may be reading.
                (self._leases.end if is_done else self._leases.keep)(lease)

    def _answer(self, first: int, count: int) -> None:
        """Answers one WANT: a frame for each run of chunks that can be had in the same way, or not at all."""
        handing = self._node.handing
        deadline = Deadline(self._node.clock, seconds_left(self._context, self._node.limits.read_deadline_s))
        indexes = range(first, first + count)
        allowed = self._asked.allowed(self._node.holds, self._node.gc_view, indexes)
        how = dict.fromkeys(indexes, Kind.ABSENT)
        offsets: dict[int, int] = {}
        readers: dict[int, PosixReader] = {}
        slots = self._found(allowed, deadline)
        try:
            there = _there(allowed, slots)
            if there and slots is not None and self._lend(slots):
                slots, offsets = None, there
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
        """Those in memory. A prompt whose client takes files alone is not looked for there."""
        if not allowed or (self._is_chain and self._leases is None):
            return None
        return self._node.handing.in_memory(self._wanted, allowed, deadline, brings=not self._asked.memory_only)

    def _lend(self, slots: Slots) -> bool:
        """True if the client may have these chunks mapped; else there are too many leases, or too much is leased, and
        ``slots`` is still the caller's to release.
        """
        if self._leases is None or (lease := self._lease or self._leases.begin()) is None:
            return False
        self._lease = lease
        return self._leases.add(lease, slots)

    def _send(self, kind: Kind, run: list[int], offsets: dict[int, int], readers: dict[int, PosixReader]) -> bool:
        """Tells the client how to get a run of chunks; returns whether anything may follow it."""
        if kind is Kind.SLOTS:
            assert self._lease is not None
            given = encode_slots(Given(run[0], tuple(offsets[index] for index in run)))
            self._channel.send(kind, self._number, [given], self._lease.hand())
            self._lease.handed_over()
        elif kind is Kind.FILES:
            files = [readers[index].fileno() for index in run]
            self._channel.send(kind, self._number, [encode_span(run[0], len(run))], files)
        else:
            self._channel.send(kind, self._number, [encode_span(run[0], len(run))])
            return not self._is_chain
        self.given += run
        return True


def _there(indexes: Sequence[int], slots: Slots | None) -> dict[int, int]:
    """Returns the offsets of the chunks that are in memory."""
    entries = slots.entries if slots is not None else []
    return {index: entry.offset for index, entry in zip(indexes, entries, strict=False) if entry is not None}
