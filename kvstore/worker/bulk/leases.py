"""Leases: chunks in the worker's memory that a client on this host reads or has views of; they are not evicted.

A lease is a pipe of which the client gets one end. Whatever ends that client, or drops its arrays, closes its end, and
the kernel tells us. Nobody sends anything, and a broken connection does not end a lease that is still read.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

from kvstore.node.memory_tier import MemoryTier
from kvstore.node.slots import Slots

LEASES_MAX = 1024
"""Leases alive at once, one file descriptor each; beyond that chunks are read as if memory did not have them."""


class Lease:
    """The slots that one client may read until it closes its end. Used by one thread until it is kept."""

    def __init__(self) -> None:
        """Raises OSError if there are no more file descriptors."""
        self.watched, self.handed = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.slots: list[Slots] = []

    def hand(self) -> list[int]:
        """Returns the client's end, to send, then close by ``handed_over``; an empty list from the second call on."""
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
        """Returns a new lease, to be kept; None if there are too many."""
        with self._lock:
            if self._closed or self._count >= self._leases_max:
                return None
            try:
                self._epoll = self._epoll or select.epoll()  # now: a lease that nobody can watch would never end
                lease = Lease()
            except OSError:
                return None
            self._count += 1
        return lease

    def add(self, lease: Lease, slots: Slots) -> bool:
        """Adds ``slots`` to the lease; False if too much of the memory is leased (rule L1)."""
        if not self._memory.lease(slots):
            return False
        lease.slots.append(slots)
        return True

    def keep(self, lease: Lease) -> None:
        """Ends the lease when its client closes its end, which may have happened already."""
        lease.handed_over()
        with self._lock:
            # After close nobody waits for clients, and the slots that they read stay taken.
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
            # Watch for the end only: what a client writes into its pipe is never read.
            self._epoll.register(lease.watched, 0)

    def close(self, timeout_s: float) -> None:
        """Ends the thread. Slots that clients still read stay referenced for good. Idempotent."""
        with self._lock:
            self._closed = True
            kept, self._kept = list(self._kept.values()), {}
            epoll, self._epoll = self._epoll, None
        if epoll is None:
            return
        if self._thread is None:
            epoll.close()
            return
        # A pipe of our own, closed at once, wakes up the thread.
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
                    self._end(lease)

    def _end(self, lease: Lease) -> None:
        os.close(lease.watched)
        for each in lease.slots:
            each.release()
        with self._lock:
            self._count -= 1
