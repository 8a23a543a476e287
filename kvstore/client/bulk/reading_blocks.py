"""Reading engine-hashed blocks over a bulk connection, each into its buffer: from memory, from files, or as bytes.

Separate from reads of prompts, because a missing block ends nothing, and each has its own size and buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.buffers import Borrowed, Pieces
from kvstore.client.bulk.given import Giving, NotGiven
from kvstore.client.bulk.handed import take_given
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.receiving import fill_verified, is_small, receive_images
from kvstore.client.limits import ClientLimits
from kvstore.format.header import Damaged
from kvstore.node.deadline import Deadline
from kvstore.node.images import take_images
from kvstore.node.wanted import Keyed, expected_of, image_bytes
from kvstore.sections import Buffers
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import INDEX_BYTES, Head, Kind, Mode, decode_index, encode_request
from kvstore.wire.messages import pack_keys, pack_sizes
from kvstore.wire.traces import traced


class BlockReading:
    """One read of blocks over one connection. Sets ``hits`` for each block that is in its buffer, verified.

    ``hold`` is the id of a hold of the worker to read under; empty for none.
    """

    def __init__(
        self,
        link: Link,
        wanted: Keyed,
        buffers: Pieces,
        hits: list[bool],
        lanes: FileLanes,
        limits: ClientLimits,
        hold: bytes = b"",
    ) -> None:
        self._link = link
        self._wanted = wanted
        self._buffers = buffers
        self._hits = hits
        self._lanes = lanes
        self._limits = limits
        self._hold = hold
        self.damaged: list[int] = []
        """Indexes of blocks that arrived damaged."""

    def run(self, indexes: Sequence[int]) -> None:
        """Reads the blocks at these indexes. Raises LinkBroken, LinkLate, BulkRefused, InvalidRequest."""
        link = self._link
        if (mode := link.mode) is not Mode.STREAM:
            # Blocks in memory may be too many to lease, or the root may have no files to hand over: then as bytes.
            indexes = self._take_given(indexes, mode)
        if indexes:
            self._receive(indexes)

    def _take_given(self, indexes: Sequence[int], mode: Mode) -> list[int]:
        """Reads what the worker offers a client on its host; returns the indexes that must come as bytes."""
        number, timeout_s = self._begin(indexes, mode)
        asked, elsewhere = self._wanted.picked(indexes), list[int]()
        deadline = Deadline(self._lanes.clock, timeout_s)
        into = Buffers([self._buffers[index] for index in indexes])
        read = 0
        with Giving(self._link, number, mode, has_gaps=True) as giving:
            for given in giving.each_or_not(0, len(indexes)):
                span = indexes[given.first : given.first + given.count]
                if isinstance(given, NotGiven):
                    elsewhere += span if given.is_elsewhere else []
                    continue
                done = take_given(self._link, asked, given, into, self._lanes, deadline)
                for index, right in zip(span, done, strict=True):
                    self._hits[index] = bool(right)
                self.damaged += [index for index in span if not self._hits[index]]
                read += sum(done)
            giving.finish(read)
        return elsewhere

    def _receive(self, indexes: Sequence[int]) -> None:
        """Reads whole images that come as bytes, several small ones at a time."""
        small = [index for index in indexes if is_small(image_bytes(self._wanted, index))]
        if small:
            self._receive_small(small)
        large = [index for index in indexes if not is_small(image_bytes(self._wanted, index))]
        if large and self._link.channel.alive:
            self._receive_large(large)
        elif large:
            self.damaged += large

    def _receive_small(self, indexes: Sequence[int]) -> None:
        self._begin(indexes, Mode.STREAM)
        left, channel, into = set(range(len(indexes))), self._link.channel, Buffers(self._buffers)

        def accept(at: int, came_bytes: int) -> None:
            self._check(at, left, indexes, came_bytes)

        for memory, came in receive_images(self._link, accept):
            found = [indexes[at] for at in came]
            images = [memory[place] for place in came.values()]
            done = take_images(self._wanted, found, images, into, Borrowed())
            for index, right in zip(found, done, strict=True):
                self._hits[index] = bool(right)
            if not done.all():
                channel.alive = False
                self.damaged += [index for index in indexes if not self._hits[index]]
                return
        self._end(channel.receive_head())

    def _receive_large(self, indexes: Sequence[int]) -> None:
        """Reads each image straight into its buffer."""
        self._begin(indexes, Mode.STREAM)
        channel, left = self._link.channel, set(range(len(indexes)))
        while (head := channel.receive_head()).kind is Kind.FILE:
            at = decode_index(channel.receive(INDEX_BYTES)) if head.length > INDEX_BYTES else -1
            self._check(at, left, indexes, head.length - INDEX_BYTES)
            expected = expected_of(self._wanted, indexes[at])
            try:
                fill_verified(channel.receive_some, expected, [self._buffers[indexes[at]]])
            except Damaged:
                channel.alive = False  # the stream may be in the middle of a frame
                self.damaged += [indexes[at], *(indexes[other] for other in left)]
                return
            self._hits[indexes[at]] = True
        self._end(head)

    def _check(self, at: int, left: set[int], indexes: Sequence[int], came_bytes: int) -> None:
        """Takes block ``at`` out of ``left``. Raises LinkBroken if it was not asked for, or has another size."""
        channel = self._link.channel
        if at not in left:
            raise channel.break_off(f"received block {at}, which was not asked for or came before")
        left.remove(at)
        if came_bytes != image_bytes(self._wanted, indexes[at]):
            raise channel.break_off(f"an image of {came_bytes} bytes came for block {indexes[at]}")

    def _end(self, head: Head) -> None:
        if head.kind is Kind.REFUSED:
            self._link.refused(head)
        self._link.channel.expect(head, Kind.END)
        self._link.channel.receive(head.length)

    def _begin(self, indexes: Sequence[int], mode: Mode) -> tuple[int, float]:
        """Sends the request; returns its number and how long it may take."""
        asked, limits = self._wanted.picked(indexes), self._limits
        request = pb.GetBlocksRequest(
            namespace=asked.namespace.digest,
            keys=pack_keys(asked.keys),
            sizes=pack_sizes(asked.sizes_bytes),
            hold=self._hold,
        )
        timeout_s = limits.stream_s(limits.read_s, sum(asked.sizes_bytes))
        channel, number = self._link.channel, self._link.next_number()
        channel.limit(limits.read_s, timeout_s)
        channel.send(Kind.GET_BLOCKS, number, [encode_request(timeout_s, mode, traced(request))])
        return number, timeout_s
