"""Answers to WANT: chunks that a client on this host reads itself, in memory that it has mapped or in open files.

The client verifies: what it gets is whole files, or images of them, with their headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.address import Chain
from kvstore.counts import NodeCount
from kvstore.errors import InvalidRequest
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.slots import Slots
from kvstore.root.posix_reader import PosixReader
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import FILES_MAX, Given, Kind, Mode, decode_span, encode_slots, encode_span
from kvstore.worker.bulk.leases import Lease, Leases
from kvstore.worker.calls import CallContext, seconds_left

KEEP = 1
"""What READ says first where the client goes on reading what it leased."""


class HandingOver:
    """One request of mode FILES or SLOTS, about ``count`` chunks or blocks; without ``leases`` it gets no slots."""

    def __init__(self, channel: Channel, number: int, count: int, leases: Leases | None) -> None:
        self._channel = channel
        self._number = number
        self._count = count
        self._leases = leases
        self._lease: Lease | None = None

    def serve(self, answer: Callable[[int, int], object]) -> int:
        """Has each WANT answered by ``answer(first, count)`` until the client says how many it read, which this
        returns.
        """
        with self._leasing() as leasing:
            while True:
                head, payload = self._channel.receive_frame(Kind.WANT, Kind.READ)
                first, wanted = decode_span(payload)
                if head.kind is Kind.READ:
                    leasing.append(first != KEEP)
                    return min(wanted, self._count)
                if not 1 <= wanted <= FILES_MAX or first + wanted > self._count:
                    raise InvalidRequest(
                        f"files of chunks {first} to {first + wanted - 1} are wanted: {self._count} are held"
                    )
                answer(first, wanted)

    def lease(self, slots: Slots) -> bool:
        """Whether the client may have these chunks mapped; else there are too many leases, or too much is leased, and
        ``slots`` is still the caller's to release.
        """
        if self._leases is None or (lease := self._lease or self._leases.begin()) is None:
            return False
        self._lease = lease
        return self._leases.add(lease, slots)

    def send_slots(self, first: int, offsets: Sequence[int]) -> None:
        """Says where leased chunks lie."""
        assert self._lease is not None
        given = encode_slots(Given(first, tuple(offsets)))
        self._channel.send(Kind.SLOTS, self._number, [given], self._lease.hand())
        self._lease.handed_over()

    def send_files(self, first: int, readers: Sequence[PosixReader]) -> None:
        """Hands over open files, which stay the caller's to close."""
        files = [reader.fileno() for reader in readers]
        self._channel.send(Kind.FILES, self._number, [encode_span(first, len(files))], files)

    @contextmanager
    def _leasing(self) -> Iterator[list[bool]]:
        """Around the request. Its lease ends with it where the client said that it is done, and else with the client:
        one that we waited for in vain may still be reading.
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


class ChunkHanding:
    """Chunks of a prompt, after START. ``hold`` is None where only memory may be asked (rule P2)."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        chain: Chain,
        hold: Hold | None,
        count: int,
        leases: Leases | None,
        context: CallContext,
    ) -> None:
        self._node = node
        self._channel = channel
        self._number = number
        self._chain = chain
        self._hold = hold
        self._context = context
        self._handing = HandingOver(channel, number, count, leases)
        self.from_memory_count = 0
        """Chunks that were handed over in memory; the others in files."""

    def serve(self, mode: int) -> int:
        """Hands over what the client wants until it says how many leading chunks it read, which this returns."""
        return self._handing.serve(self._files if mode == Mode.FILES else self._slots_or_files)

    def _slots_or_files(self, first: int, wanted: int) -> None:
        """Answers one WANT by as many frames as it takes; END where the next chunk is not to be had in this way."""
        at, stop = first, first + wanted
        self._bring(first, wanted)
        while at < stop:
            given = self._slots(at, stop - at)
            if not given and self._hold is not None and self._node.hands_files:
                given = self._files(at, self._missing(at, stop), may_be_none=False)
            if not given:
                self._channel.send(Kind.END, self._number)
                return
            at += given

    def _bring(self, first: int, wanted: int) -> None:
        memory = self._node.memory
        if memory is not None and self._hold is not None and memory.leading(self._chain, first) < wanted:
            self._node.bring(self._hold, first, wanted, self._left_s())

    def _slots(self, first: int, wanted: int) -> int:
        """Says where the leading chunks lie; returns how many there are in memory, and may be leased."""
        memory = self._node.memory
        if memory is None:
            return 0
        found = min(wanted, memory.leading(self._chain, first))
        if not found:
            return 0
        slots = memory.refer(self._chain, first, found)
        offsets = [entry.offset for entry in slots.entries[: slots.leading_count] if entry is not None]
        if not offsets or not self._handing.lease(slots):
            slots.release()  # evicted since we looked, or too much is leased
            return 0
        self._handing.send_slots(first, offsets)
        self._node.counters.add(NodeCount.MEMORY_HITS, len(offsets))
        self.from_memory_count += len(offsets)
        return len(offsets)

    def _missing(self, first: int, stop: int) -> int:
        """How many leading chunks are not in memory; at least one, which could not be leased."""
        assert self._node.memory is not None
        at = first + 1
        while at < stop and not self._node.memory.leading(self._chain, at):
            at += 1
        return at - first

    def _files(self, first: int, wanted: int, *, may_be_none: bool = True) -> int:
        """Opens the files of the leading chunks; returns how many there are."""
        assert self._hold is not None
        readers = self._node.open_files(self._hold, first, wanted, self._left_s())
        try:
            if readers or may_be_none:
                self._handing.send_files(first, readers)
        finally:
            for reader in readers:
                reader.close()
        return len(readers)

    def _left_s(self) -> float:
        return seconds_left(self._context, self._node.limits.read_deadline_s)
