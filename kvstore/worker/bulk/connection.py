"""One client's connection: its channel, the arena that it shares, and the ledger that says what of it is free again."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.memory.arena import follow
from kvstore.security.identity import NOTHING, Presented
from kvstore.waiting import Flag
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.ledger import LEDGER_BYTES, entry_of, entry_value


class Ledger:
    """What a client may use again: written by the worker, read by the client through the same memory."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvstore-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, LEDGER_BYTES)
        # A client that maps it beyond its end would be killed, so it never changes its size.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._entries = np.frombuffer(mmap.mmap(self.fd, LEDGER_BYTES), np.uint64)

    def released(self, request: int, count: int) -> None:
        """The first ``count`` chunks of a put are not needed in the arena any more."""
        # One aligned store of 8 bytes: the client sees the old value or the new one.
        self._entries[entry_of(request)] = entry_value(request, count)

    def close(self) -> None:
        """Closes the file; the memory stays as long as a put that is written behind needs it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Connection:
    """A channel and what belongs to it. Used by one thread at a time, except the ledger."""

    def __init__(self, channel: Channel, presented: Presented = NOTHING) -> None:
        self.channel = channel
        self.presented = presented
        """What the client showed when it asked for leave to connect: looked at again with each request."""
        self.ledger = Ledger() if channel.is_unix else None
        self._arena = memoryview(b"")
        self._closing = Flag()

    @property
    def has_arena(self) -> bool:
        """Whether the client shares memory."""
        return len(self._arena) > 0

    def adopt_arena(self, size_bytes: int, arena_bytes_max: int) -> None:
        """Maps the memory that came with the last frame, read-only, instead of what was mapped before.

        Raises InvalidRequest unless it is sealed against shrinking: reading behind its end would kill the worker.
        """
        fd = self.channel.take_files(1)[0]
        try:
            if not 0 < size_bytes <= arena_bytes_max:
                raise InvalidRequest(f"an arena of {size_bytes} bytes: expected 1 to {arena_bytes_max}")
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as cause:
                raise InvalidRequest("an arena must be a memfd: this is another kind of file") from cause
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size_bytes:
                raise InvalidRequest("an arena must have its size, and be sealed against shrinking (F_SEAL_SHRINK)")
            if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
                raise InvalidRequest("an arena must be of ordinary pages: huge ones can run out under who reads it")
            try:
                mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            except (OSError, ValueError) as cause:
                raise InvalidRequest(f"the arena could not be mapped: {cause}") from cause
            self._arena = memoryview(mapped)
            self._closing.set()
            self._closing = Flag()
            follow(self._arena, fd, self._closing)
        finally:
            os.close(fd)

    def placed(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes in the arena. Raises InvalidRequest where they are not all in it."""
        end = offset + size_bytes
        if end > len(self._arena):
            raise InvalidRequest(f"bytes {offset} to {end} are said to be in an arena of {len(self._arena)}")
        return self._arena[offset:end]

    def close(self) -> None:
        """Idempotent. The arena stays mapped as long as a put that is written behind needs it."""
        self._closing.set()
        self.channel.close()
        self._arena = memoryview(b"")
        if self.ledger is not None:
            self.ledger.close()
