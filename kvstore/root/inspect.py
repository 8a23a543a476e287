"""Inspects one chunk file on its own: is it whole, and which chunk is it?

A node verifies a file against the chunk that it asked for. Here no chunk is asked for, so the file alone has to show
that it is one of ours. Used by ``fsck`` and by garbage collection, which both settle the files in quarantine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import xxhash

from kvstore.core.buffers import BufferLoan
from kvstore.format.header import (
    HEADER_BYTES_MAX,
    PAGE_BYTES,
    Damage,
    Damaged,
    Header,
    Stored,
    decode_any,
    is_self_consistent,
)
from kvstore.format.places import Name
from kvstore.root.interface import FileReader, Root

READ_BYTES = 4 << 20

_SIZE_FIELD = slice(16, 20)


Verdict = Header | Damage | None
"""The header of a whole chunk; why a file is none; None: there is no such file."""


class Inspector:
    """Looks at files one by one, through one buffer, no faster than ``bytes_per_s`` on average."""

    def __init__(
        self,
        root: Root,
        *,
        verify_payload: bool = True,
        bytes_per_s: float | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.read_bytes = 0
        self._root = root
        self._verify_payload = verify_payload
        self._bytes_per_s = bytes_per_s
        self._monotonic_s = monotonic_s
        self._pause = pause
        self._started_s = monotonic_s()
        self._buffer = bytearray(READ_BYTES)

    def look(self, name: Name, *, thorough: bool = False) -> Verdict:
        """Returns the verdict about one file; ``thorough`` verifies the payload in any case. Raises the root's errors.

        A file that looks broken is read a second time: on a root without exclusive publish another writer may have
        replaced it between two reads.
        """
        verify_payload = thorough or self._verify_payload
        verdict = self._look_once(name, verify_payload)
        return self._look_once(name, verify_payload) if isinstance(verdict, Damage) else verdict

    def _look_once(self, name: Name, verify_payload: bool) -> Verdict:
        reader = self._root.open(name)
        if reader is None:
            return None
        with reader:
            try:
                header = self._header(reader)
                if header.file_bytes != reader.stat.size_bytes:
                    raise Damaged(Damage.SIZE)
                if not is_self_consistent(header):
                    raise Damaged(Damage.IDENTITY)
                if verify_payload:
                    self._payload(reader, header)
            except Damaged as damaged:
                return damaged.damage
        return header

    def _header(self, reader: FileReader) -> Header:
        page = self._read(reader, 0, PAGE_BYTES)
        try:
            return decode_any(page)
        except Damaged as damaged:
            # A header of several pages looks like this after the first page. Check its size field before use.
            size = int.from_bytes(page[_SIZE_FIELD], "little") if len(page) >= PAGE_BYTES else 0
            if damaged.damage is not Damage.GEOMETRY or not PAGE_BYTES < size <= HEADER_BYTES_MAX:
                raise
        return decode_any(self._read(reader, 0, size))

    def _payload(self, reader: FileReader, header: Header) -> None:
        offset = header.header_bytes
        # Verify an encoded file as it is stored: that shows what its writer wrote, and takes no key.
        plain = [Stored(each, header.section_bytes) for each in header.checksums]
        for expected in header.stored or plain:
            state, end = xxhash.xxh3_64(), offset + expected.size_bytes
            while offset < end:
                part = self._read(reader, offset, min(end - offset, READ_BYTES))
                if not part:
                    raise Damaged(Damage.SIZE)
                state.update(part)
                offset += len(part)
            if state.intdigest() != expected.checksum:
                raise Damaged(Damage.SECTION_CHECKSUM)

    def _read(self, reader: FileReader, offset: int, size: int) -> memoryview:
        view = memoryview(self._buffer)[:size]
        count = reader.read([view], offset, BufferLoan())
        self.read_bytes += count
        if self._bytes_per_s is not None:
            ahead_s = self.read_bytes / self._bytes_per_s - (self._monotonic_s() - self._started_s)
            if ahead_s > 0:
                self._pause(ahead_s)
        return view[:count]
