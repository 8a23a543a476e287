"""Leases: chunks in the worker's memory that a client on this host reads, or has views of, and so are not given away.

A lease is the end of a pipe that the client is given.  Whatever ends that client, or lets it forget its arrays, closes
its end, and the kernel tells us: nothing has to be sent, by nobody, and no broken connection ends a lease whose client
still reads.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

from kvstore.node.memory_tier import MemoryTier
from kvstore.node.slots import Slots

LEASES_MAX = 1024
"""Alive at once, a file descriptor each; beyond it chunks are read as if they were not in memory."""


class Lease:
    """What one client may read until it closes its end. Used by one thread, until it is kept."""

    def __init__(self) -> None:
        """Raises OSError where there are no more files."""
        self.watched, self.handed = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.slots: list[Slots] = []

    def hand(self) -> list[int]:
        """The client's end, to be sent with a frame and closed by ``handed_over``; nothing from the second time on."""
        return [self.handed] if self.handed >= 0 else []

    def handed_over(self) -> None:
        """Closes our copy of the client's end. Idempotent."""
        fd, self.handed = self.handed, -1
        if fd >= 0:
            os.close(fd)


class Leases:
    """All leases on one memory; thread-safe. A thread waits for those that outlive their request."""

    def __init__(self, memory: MemoryTier, leases_max: int = LEASES_MAX) -> None:
        self._memory = memory
        self._leases_max = leases_max
        self._lock = threading.Lock()
        self._count = 0
        self._kept: dict[int, Lease] = {}
        self._epoll: select.epoll | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return self._count

    def begin(self) -> Lease | None:
        """A new lease, to be ended or kept; None where there are too many."""
        with self._lock:
            if self._closed or self._count >= self._leases_max:
                return None
            try:
                self._epoll = self._epoll or select.epoll()  # now: a lease that nobody can watch would have no end
                lease = Lease()
            except OSError:
                return None
            self._count += 1
        return lease

    def add(self, lease: Lease, slots: Slots) -> bool:
        """Has the lease refer to ``slots``; False where too much of the memory is leased (rule L1)."""
        if not self._memory.lease(slots):
            return False
        lease.slots.append(slots)
        return True

    def end(self, lease: Lease) -> None:
        """Ends it at once: its client said that it is done, or was never told of it."""
        lease.handed_over()
        os.close(lease.watched)
        slots, lease.slots = lease.slots, []
        for each in slots:
            each.release()
        with self._lock:
            self._count -= 1

    def keep(self, lease: Lease) -> None:
        """Ends it when its client has closed its end, which may have been long ago."""
        lease.handed_over()
        with self._lock:
            # Once it is closed nobody waits for clients any more, and what they read stays as it is.
            if self._closed:
                os.close(lease.watched)
                return
            assert self._epoll is not None, "begin has made it"
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, args=(self._epoll,), name="kvstore-leases", daemon=True
                )
                self._thread.start()
            self._kept[lease.watched] = lease
            # For nothing but the end: what a client writes into its pipe is never looked at.
            self._epoll.register(lease.watched, 0)

    def close(self, timeout_s: float) -> None:
        """Ends the thread. What clients read at this moment stays referenced, for good. Idempotent."""
        with self._lock:
            self._closed = True
            kept, self._kept = list(self._kept.values()), {}
            epoll, self._epoll = self._epoll, None
        if epoll is None:
            return
        if self._thread is None:
            epoll.close()
            return
        # An end of ours, closed at once, wakes the thread up.
        reader, writer = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):
            epoll.register(reader, 0)
        os.close(writer)
        self._thread.join(timeout_s)
        epoll.close()
        for fd in (reader, *(lease.watched for lease in kept)):
            os.close(fd)

    def _watch(self, epoll: select.epoll) -> None:
        while not self._closed:
            try:
                ended = epoll.poll()
            except (OSError, ValueError):
                return  # closed
            for fd, _ in ended:
                with self._lock:
                    lease = self._kept.pop(fd, None)
                if lease is not None:
                    epoll.unregister(fd)
                    self.end(lease)
