"""Chunks that arrive piece by piece, verified while they are in the CPU's cache.

Large chunks go straight into the caller's memory. Several small ones are received into one buffer and copied on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Pieces, byte_length, skip
from kvstore.client.bulk.links import Link
from kvstore.format.checksum import checksum
from kvstore.format.header import Damage, Damaged, Expected, decode_as, expected_chunk
from kvstore.native import library as native
from kvstore.node.images import ImagesIn, take_images
from kvstore.node.items import Items
from kvstore.sections import Planes, Sections
from kvstore.wire.bulk.channel import Channel, LinkBroken
from kvstore.wire.bulk.frames import HEAD_BYTES, INDEX_BYTES, Kind, decode_index, encode_head, encode_index

GROUP_BYTES = 1 << 20
"""Bytes of small chunks received together: few enough to be in the CPU's cache when they are copied on."""
ALIGNED_BYTES = 64
_BEFORE_BYTES = HEAD_BYTES + INDEX_BYTES


def receive_chunks(link: Link, number: int, chain: Chain, first: int, count: int, sections: Sections) -> Iterator[int]:
    """Receives chunks ``first`` to ``count - 1`` of a stream and its end, which may come early.

    Yields, after each step, how many leading chunks of the prompt are good. Raises Damaged, LinkBroken, BulkRefused.
    """
    many = GROUP_BYTES // (expected_chunk(chain, first).file_bytes + _BEFORE_BYTES) if first < count else 0
    natively: Natively | None = None
    if many < 2 and first < count and link.channel.moves_natively and isinstance(sections, Planes):
        natively = Natively(chain, first, count, sections)
    while first < count:
        if many < 2:
            if not receive_chunk(link, chain, first, natively or sections):
                return
            first += 1
            yield first
            continue
        wanted = min(many, count - first)
        came, good = _receive_many(link, number, chain, first, wanted, sections)
        first += good
        yield first
        if good < came:
            link.channel.alive = False  # the rest of this stream was not read
            raise Damaged(Damage.SECTION_CHECKSUM)
        if came < wanted:
            break
    link.receive(Kind.END)


def _receive_many(link: Link, number: int, chain: Chain, first: int, count: int, sections: Sections) -> tuple[int, int]:
    """Returns how many of ``count`` small chunks came before another frame, and how many leading ones are good.

    They are received into one buffer and copied on, because a few calls for each would cost more than its bytes.
    """
    channel, file_bytes = link.channel, expected_chunk(chain, first).file_bytes
    record_bytes = _BEFORE_BYTES + file_bytes
    stride = -(-record_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
    buffer = memoryview(bytearray(count * stride))
    records = [buffer[start : start + record_bytes] for start in range(0, count * stride, stride)]
    head = encode_head(Kind.FILE, number, INDEX_BYTES + file_bytes)
    left: Pieces = records
    arrived_bytes = came = 0
    while came < count or arrived_bytes < count * record_bytes:
        step_bytes = channel.receive_some(left)
        arrived_bytes += step_bytes
        left = skip(left, step_bytes)
        is_other = False
        # ``came`` counts heads. Each is checked as soon as it arrives: after another frame no more may follow.
        while came < count and arrived_bytes >= came * record_bytes + HEAD_BYTES and not is_other:
            begun = bytes(records[came][: min(_BEFORE_BYTES, arrived_bytes - came * record_bytes)])
            is_other = not (head + encode_index(first + came)).startswith(begun)
            if len(begun) < _BEFORE_BYTES and not is_other:
                break
            came += not is_other
        if is_other:
            rest = b"".join(records[came:])
            channel.give_back(memoryview(rest)[: arrived_bytes - came * record_bytes])
            break
    images = ImagesIn(buffer, range(_BEFORE_BYTES, _BEFORE_BYTES + came * stride, stride), file_bytes)
    done = take_images(chain, range(first, first + came), images, sections, Borrowed())
    return came, came if done.all() else int(done.argmin())


def is_small(image_bytes: int) -> bool:
    """True if ``receive_images`` accepts images of this size: small enough that several are received together."""
    return 2 * (_BEFORE_BYTES + image_bytes) <= GROUP_BYTES


def receive_images(link: Link, accept: Callable[[int, int], None]) -> Iterator[tuple[memoryview, dict[int, slice]]]:
    """Yields small images of a stream, in any order and size, up to another frame, which is left unread.

    ``accept`` gets the index and the size of each, and raises LinkBroken if it must not come. Yields a buffer, valid
    until the next step, and where in it each image lies, by index. Raises LinkBroken, LinkLate.
    """
    channel, buffer, filled = link.channel, memoryview(bytearray(GROUP_BYTES)), 0
    while True:
        filled += channel.receive_some([buffer[filled:]])
        came: dict[int, slice] = {}
        at, is_other, broken = 0, False, None
        while filled - at >= HEAD_BYTES:
            try:
                head = channel.head_in(buffer[at : at + HEAD_BYTES])
                is_other, stop = head.kind is not Kind.FILE, at + HEAD_BYTES + head.length
                if is_other:
                    break
                if head.length < INDEX_BYTES or not is_small(head.length - INDEX_BYTES):
                    raise channel.break_off(f"received a file of {head.length} bytes among small images")
                if stop > filled:
                    break
                index = decode_index(buffer[at + HEAD_BYTES : at + _BEFORE_BYTES])
                accept(index, head.length - INDEX_BYTES)
            except LinkBroken as error:
                broken = error
                break
            came[index] = slice(at + _BEFORE_BYTES, stop)
            at = stop
        if came:
            yield buffer, came  # includes those that came before the connection was found to be bad
        if broken is not None:
            raise broken
        if is_other:
            channel.give_back(memoryview(bytes(buffer[at:filled])))
            return
        if at:  # keep an image that comes packet by packet in place: moving it for each packet would cost more than it
            rest = bytes(buffer[at:filled])
            buffer[: len(rest)] = rest
            filled = len(rest)


class Natively(Items):
    """Chunks of a stream that native code receives into an array, verifying each piece while it is in the cache."""

    def __init__(self, chain: Chain, first: int, stop: int, planes: Planes) -> None:
        super().__init__(chain, range(first, stop))
        self.lay(planes, fills=True)
        self._first = first
        self._header = np.empty(int(self.items["header_bytes"].max()), np.uint8)

    def receive(self, channel: Channel, index: int) -> None:
        """Receives one chunk's file. Raises Damaged, LinkBroken, LinkLate."""
        header: int = self._header.__array_interface__["data"][0]
        came = ctypes.create_string_buffer(native.MOVED_BYTES)
        at = self.at(index - self._first)
        if channel.receive_by(partial(native.library.kv_receive, self.common, at, header, came)) != native.DONE:
            raise Damaged(Damage.SECTION_CHECKSUM)


def receive_chunk(link: Link, chain: Chain, index: int, into: Sections | Natively) -> bool:
    """Reads one chunk of a stream; False if the stream ends before it. Raises Damaged, LinkBroken, BulkRefused."""
    channel, expected = link.channel, expected_chunk(chain, index)
    head = channel.receive_head()
    if head.kind is Kind.REFUSED:
        link.refused(head)
    channel.expect(head, Kind.FILE, Kind.END)
    if head.kind is Kind.END:
        channel.receive(head.length)
        return False
    if head.length != INDEX_BYTES + expected.file_bytes or decode_index(channel.receive(INDEX_BYTES)) != index:
        raise channel.break_off(f"received a file of {head.length} bytes: expected that of chunk {index}")
    try:
        if isinstance(into, Natively):
            into.receive(channel, index)
        else:
            fill_verified(channel.receive_some, expected, into(index))
    except Damaged:
        channel.alive = False  # the stream is in the middle of a frame
        raise
    return True


def fill_verified(
    fill: Callable[[Pieces], int], expected: Expected, sections: Pieces, step_bytes: int | None = None
) -> None:
    """Reads the file of a chunk into ``sections``. ``fill`` writes into pieces and returns how many bytes.

    With ``step_bytes``, ``fill`` is given at most that many at a time. Raises Damaged, and what ``fill`` raises.
    """
    raw = bytearray(expected.header_bytes)
    header: Pieces = [memoryview(raw)]
    while header:
        header = skip(header, fill(header))
    sums, size = decode_as(raw, expected).checksums, expected.section_bytes
    step = expected.section_count if step_bytes is None else max(1, step_bytes // size)
    for start in range(0, expected.section_count, step):
        part = sections[start : start + step]
        left: Pieces = part
        wanted, received, verified = byte_length(part), 0, 0
        while received < wanted:
            count = fill(left)
            received += count
            left = skip(left, count)
            whole = received // size
            if tuple(map(checksum, part[verified:whole])) != sums[start + verified : start + whole]:
                raise Damaged(Damage.SECTION_CHECKSUM)
            verified = whole
