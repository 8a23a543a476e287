"""One client's connection: its channel, the arena that it shares, and the ledger that says which part of it is free."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.memory.arena import follow
from kvstore.security.access import NOTHING, Presented
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.runs import LEDGER_BYTES, entry_value


class Ledger:
    """Tells a client which memory it may use again: the worker writes it, the client reads it through shared memory."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvstore-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, LEDGER_BYTES)
        # Sealed in its size: a client that reads past the end would be killed (SIGBUS).
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._entry = np.frombuffer(mmap.mmap(self.fd, LEDGER_BYTES), np.uint64)

    def released(self, request: int, count: int) -> None:
        """Says that the first ``count`` chunks of a put are no longer needed in the arena."""
        # One aligned store of 8 bytes: the client sees the old value or the new one.
        self._entry[0] = entry_value(request, count)

    def close(self) -> None:
        """Closes the file; the memory stays as long as a put that hangs needs it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Connection:
    """A channel and its arena and ledger. Used by one thread at a time, except the ledger."""

    def __init__(self, channel: Channel, presented: Presented = NOTHING) -> None:
        self.channel = channel
        self.presented = presented
        """The client's credentials from its request to connect; checked again with each request."""
        self.ledger = Ledger() if channel.is_unix else None
        self._arena = memoryview(b"")
        self._closing = threading.Event()

    def adopt_arena(self, size_bytes: int, arena_bytes_max: int) -> None:
        """Maps the memory that came with the last frame, read-only, in place of the previous mapping.

        Raises InvalidRequest unless it is sealed against shrinking: reading past its end would kill the worker
        (SIGBUS).
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
                raise InvalidRequest("an arena must have ordinary pages: huge pages can run out while it is read")
            try:
                mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            except (OSError, ValueError) as cause:
                raise InvalidRequest(f"the arena could not be mapped: {cause}") from cause
            self._arena = memoryview(mapped)
            self._closing.set()
            self._closing = threading.Event()
            follow(self._arena, fd, self._closing)
        finally:
            os.close(fd)

    def placed(self, offset: int, size_bytes: int) -> memoryview:
        """Returns bytes in the arena. Raises InvalidRequest if they are not all within it."""
        end = offset + size_bytes
        if end > len(self._arena):
            raise InvalidRequest(f"bytes {offset} to {end} are outside of the arena of {len(self._arena)} bytes")
        return self._arena[offset:end]

    def close(self) -> None:
        """Closes the connection. The arena stays mapped while a put that hangs needs it. Idempotent."""
        self._closing.set()
        self.channel.close()
        self._arena = memoryview(b"")
        if self.ledger is not None:
            self.ledger.close()
