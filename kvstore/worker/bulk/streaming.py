"""Whole images sent as bytes: straight from memory, or read on the node's lanes while earlier ones are sent.

The client verifies: it gets whole files, with their headers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvstore.address import Chain
from kvstore.buffers import byte_length, grouped
from kvstore.counts import NodeCount, WorkerCount
from kvstore.node.handing import Asked
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.reading import Reading
from kvstore.node.slots import Slots
from kvstore.node.wanted import image_sizes, payload_bytes
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, encode_head, encode_index
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.call import CallContext
from kvstore.worker.calls import Calls, seconds_left

WINDOW_CHUNKS = 1024
"""Chunks looked up at once: enough that tiny ones cost little each, few enough that the first come soon."""
TINY_BYTES = 1024
"""Pieces smaller than this on average are joined before they are sent: a copy costs less than a piece in the kernel."""
WINDOWS = 2
"""Windows in progress at once: one is sent while the next is read."""


@dataclass(slots=True, eq=False)
class Window:
    """Some chunks in progress: images in memory, and others that are read into a buffer."""

    indexes: range
    slots: Slots | None = None
    hot: dict[int, memoryview] = field(default_factory=dict)
    """The images in memory that are sent, by chunk index."""
    images: dict[int, memoryview] = field(default_factory=dict)
    """The images that are read, by chunk index."""
    is_whole: bool = False
    """True if all of those could be read."""
    buffer: memoryview | None = None
    reading: Reading | None = None

    def close(self) -> None:
        """Ends the window: nobody writes into the buffer any more, and its memory may be given away. Idempotent."""
        if self.reading is not None:
            self.reading.withdraw()
        if self.slots is not None:
            self.slots.release()


class ImageStream:
    """One GET of mode STREAM."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        asked: Asked,
        in_flight: BytesInFlight,
        calls: Calls,
        buffers: Buffers,
        window_bytes: int,
    ) -> None:
        self._node = node
        self._channel = channel
        self._number = number
        self._asked = asked
        self._wanted = asked.wanted
        self._is_chain = isinstance(asked.wanted, Chain)
        self._in_flight = in_flight
        self._calls = calls
        self._buffers = buffers
        self._window_bytes = window_bytes
        self._most_bytes = 0
        self._is_reserved = False
        self.sent: list[int] = []
        """Indexes of the chunks that were sent."""

    def send(self, first: int, stop: int, context: CallContext) -> None:
        """Sends chunks ``first`` to ``stop - 1``, of a prompt up to the first missing one; then END."""
        indexes = range(first, stop)
        sizes = image_sizes(self._wanted, indexes)
        cuts = list(grouped(sizes, 2 * self._window_bytes, WINDOW_CHUNKS))
        self._most_bytes = max((sum(sizes[cut]) for cut in cuts), default=0)
        begun: deque[Window] = deque()
        with ExitStack() as reserved:
            try:
                for at, cut in enumerate(cuts):
                    if not begun:
                        begun.append(Window(indexes[cut]))
                        self._begin(begun[0], sizes[cut], reserved, self._deadline(context))
                    images, whole = self._wait(begun[0], self._deadline(context))
                    if whole and at + 1 < len(cuts):
                        begun.append(Window(indexes[cuts[at + 1]]))  # read while this one is sent
                        self._begin(begun[1], sizes[cuts[at + 1]], reserved, self._deadline(context))
                    self._send(images)
                    self._end(begun.popleft())
                    if not whole:
                        break
            finally:
                for window in begun:
                    window.close()
        self._channel.send(Kind.END, self._number)

    def _begin(self, window: Window, sizes: Sequence[int], reserved: ExitStack, deadline: Deadline) -> None:
        handing = self._node.handing
        allowed = self._asked.allowed(self._node.holds, self._node.gc_view, window.indexes)
        if allowed:
            window.slots = handing.in_memory(self._wanted, allowed, deadline, brings=not self._asked.memory_only)
        if window.slots is not None:
            entries = zip(allowed, window.slots.entries, strict=True)
            there = [index for index, entry in entries if entry is not None]
            window.hot = dict(zip(there, window.slots.present_images(), strict=True))
        left = [index for index in allowed if index not in window.hot]
        if not left or self._asked.memory_only:
            return
        if not self._is_reserved:
            reserved.enter_context(self._in_flight.reserved(WINDOWS * self._most_bytes))
            self._is_reserved = True
        window.buffer = self._buffers.take(self._most_bytes)  # of one size, so that they can be reused
        at = 0
        for index in left:
            size = sizes[index - window.indexes.start]
            window.images[index] = window.buffer[at : at + size]
            at += size
        window.reading = handing.begin_copy(self._wanted, left, window.images.__getitem__)

    def _wait(self, window: Window, deadline: Deadline) -> tuple[dict[int, memoryview], bool]:
        """Waits for a window; returns the images to send, and whether more may follow them."""
        if not self._is_chain:
            self._send(window.hot)  # while the others are read
        if window.reading is not None:
            done = window.reading.wait(deadline)
            came = [index for index, whole in zip(window.images, done, strict=True) if whole]
            window.is_whole = len(came) == len(window.images)
            window.images = {index: window.images[index] for index in came}
        if not self._is_chain:
            return window.images, True
        found = window.hot | window.images
        end = next((index for index in window.indexes if index not in found), window.indexes.stop)
        if end < window.indexes.stop:
            window.hot = {index: image for index, image in window.hot.items() if index < end}
        return {index: found[index] for index in range(window.indexes.start, end)}, end == window.indexes.stop

    def _end(self, window: Window) -> None:
        """Frees a window that was sent."""
        if not self._asked.memory_only:  # a peer is no caller: it counts what it gives to its own
            self._node.counters.add(NodeCount.MEMORY_HITS, len(window.hot))
            self._node.counters.add(NodeCount.MEMORY_BYTES, payload_bytes(self._wanted, list(window.hot)))
        window.close()
        if window.buffer is not None and window.is_whole:
            # A lane past its deadline may still be reading into the others: such a buffer is never reused.
            self._buffers.give(window.buffer)

    def _send(self, images: dict[int, memoryview]) -> None:
        # In few system calls: the heads of small chunks would cost more than their bytes.
        pieces: list[memoryview] = []
        for index, image in images.items():
            head = encode_head(Kind.FILE, self._number, INDEX_BYTES + len(image))
            pieces += (memoryview(head + encode_index(index)), image)
        self._calls.add(WorkerCount.WIRE_BYTES_OUT, payload_bytes(self._wanted, list(images)))
        if byte_length(pieces) < TINY_BYTES * len(pieces):
            pieces = [memoryview(b"".join(pieces))]
        self._channel.send_bytes(pieces)
        self.sent += images

    def _deadline(self, context: CallContext) -> Deadline:
        return Deadline(self._node.clock, seconds_left(context, self._node.limits.read_deadline_s))
