"""An open file of a mounted root: read straight into the caller's memory if that cannot block.

A system call that hangs on a dead mount cannot be taken back: it would write into the caller's array long after the
caller has given up (``Borrowed``). So a read that may block fills memory of ours first.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import suppress

import numpy as np

from kvstore.buffers import Borrowed, Pieces, byte_length, skip
from kvstore.root.interface import Stat
from kvstore.root.posix_errors import MISSING_ERRORS, error_of, translated

IOV_MAX = os.sysconf("SC_IOV_MAX")
BOUNCE_BYTES = 1 << 20
"""Bytes of one blocking read; they stay in the processor's cache until they are copied on."""

RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)

_scratch = threading.local()


class PosixReader:
    """An open file of a PosixRoot."""

    __slots__ = ("_fd", "_never_blocks", "_path", "stat")

    def __init__(self, fd: int, path: str, stat: Stat, never_blocks: bool) -> None:
        self._fd = fd
        self._path = path
        self._never_blocks = never_blocks
        self.stat = stat

    def read(self, pieces: Pieces, offset: int, borrowed: Borrowed) -> int:
        wanted, done = byte_length(pieces), 0
        try:
            while done < wanted:
                count = self._read_cached(pieces, offset + done, borrowed)
                if count is None:
                    count = self._read_blocking(pieces, offset + done, borrowed, wanted - done)
                if not count:
                    break
                done += count
                if done < wanted:
                    pieces = skip(pieces, count)
        except OSError as cause:
            if cause.errno not in MISSING_ERRORS:
                raise error_of("read", self._path, cause) from cause
        return done

    def prefix(self, size_bytes: int) -> bytes:
        """Returns the file's first bytes, fewer if it became shorter. The memory is ours, so the call may block."""
        found = b""
        try:
            while len(found) < size_bytes and (more := os.pread(self._fd, size_bytes - len(found), len(found))):
                found += more
        except OSError as cause:
            if cause.errno not in MISSING_ERRORS:
                raise error_of("read", self._path, cause) from cause
        return found

    def _read_cached(self, pieces: Pieces, offset: int, borrowed: Borrowed) -> int | None:
        """Reads cached bytes straight into ``pieces``; None if nothing is cached, 0 at the end."""
        if not (self._never_blocks or RWF_NOWAIT):
            return None
        with borrowed.writing():
            try:
                return os.preadv(
                    self._fd,
                    pieces[:IOV_MAX],
                    offset,
                    0 if self._never_blocks else RWF_NOWAIT,
                )
            except OSError as cause:
                # Not cached, or a file system without RWF_NOWAIT (NFS, FUSE): read in a way that may block.
                if cause.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                    return None
                raise

    def _read_blocking(self, pieces: Pieces, offset: int, borrowed: Borrowed, wanted: int) -> int:
        """Reads up to BOUNCE_BYTES through memory of ours, and copies them on while they are in the cache."""
        with suppress(OSError):
            os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_WILLNEED)
        scratch = _scratch_buffer()
        borrowed.check()
        count = os.preadv(self._fd, [memoryview(scratch)[: min(wanted, BOUNCE_BYTES)]], offset)
        with borrowed.writing():
            start = 0
            for piece in pieces:
                size = min(len(piece), count - start)
                if not size:
                    continue
                # numpy releases the GIL for a copy of this size; slice assignment would not.
                np.copyto(
                    np.frombuffer(piece, np.uint8, size),
                    np.frombuffer(scratch, np.uint8, size, start),
                )
                start += size
        return count

    def map(self) -> memoryview | None:
        if not self.stat.size_bytes:
            return memoryview(b"")
        with translated("map", self._path):
            try:
                # Never MAP_POPULATE: it reads the whole file inside this call, which holds the GIL for as long as the
                # device takes.
                return memoryview(mmap.mmap(self._fd, self.stat.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
            except ValueError:
                return None  # the file became shorter: somebody damaged it meanwhile
            except OSError as cause:
                if cause.errno in MISSING_ERRORS:
                    return None
                raise

    def fileno(self) -> int:
        """Returns the file's descriptor, which stays this reader's."""
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def __enter__(self) -> PosixReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scratch_buffer() -> bytearray:
    """Returns this thread's bounce buffer."""
    buffer: bytearray | None = getattr(_scratch, "buffer", None)
    if buffer is None:
        buffer = _scratch.buffer = bytearray(BOUNCE_BYTES)
    return buffer
