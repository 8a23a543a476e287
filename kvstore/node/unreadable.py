"""Chunk files that could not be read: retried, then renamed away, so that the next put can repair them.

One read proves corruption; an I/O error or a missing permission may pass. But a file that stays unreadable is a
permanent miss, while its size makes every put skip the chunk. So from its first failed read on, a file is a *suspect*:
its size is not trusted, and each look reads it. After three failed reads it is renamed away like a corrupt one, unless
only the permission is missing.
Called on lanes only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kvstore.address import Address
from kvstore.buffers import Borrowed
from kvstore.errors import PermissionDenied, Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import Root

FAILED = (Unavailable, PermissionDenied)
"""The errors of a root for a file that is there and cannot be read."""
FAILURES_MAX = 3
"""Failed reads of one file after which it is renamed away."""
SUSPECTS_MAX = 1024
"""Limit on remembered files; beyond it, the oldest are trusted again until their next failure."""
READ_BYTES = 1 << 20


class Unreadable:
    """The suspects of one node. Thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._failures: OrderedDict[Address, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, address: object) -> bool:
        return address in self._failures

    def failed(self, address: Address) -> int:
        """Notes a failed read; returns how many there were."""
        with self._lock:
            count = self._failures[address] = self._failures.get(address, 0) + 1
            self._failures.move_to_end(address)
            while len(self._failures) > SUSPECTS_MAX:
                self._failures.popitem(last=False)
            return count

    def forget(self, address: Address) -> None:
        """Notes that the file was read, or is gone."""
        if address in self._failures:
            with self._lock:
                self._failures.pop(address, None)

    def settle(self, address: Address, name: Name, set_aside: Callable[[], object]) -> None:
        """Returns when a suspect can be read after all, or is gone, or was ``set_aside``.

        Raises the root's error, naming the file, if it can be neither read nor renamed: no put can repair it then.
        """
        while True:
            try:
                self.read(name)
            except FAILED as error:
                if self.failed(address) < FAILURES_MAX:
                    continue
                if isinstance(error, PermissionDenied):  # processes of another user may read it, and hold it
                    raise PermissionDenied(
                        f"{name} cannot be read ({error}): fix its permissions, or delete it"
                    ) from error
                try:
                    set_aside()
                except FAILED as refused:
                    raise type(refused)(
                        f"{name} cannot be read ({error}) and cannot be set aside ({refused}): fix its permissions, "
                        "or delete it"
                    ) from error
            self.forget(address)
            return

    def read(self, name: Name) -> bool:
        """Reads a whole file, without looking at its bytes; False if there is none. Raises the root's errors."""
        reader = self._root.open(name)
        if reader is None:
            return False
        with reader:
            piece, offset = memoryview(bytearray(min(READ_BYTES, max(1, reader.stat.size_bytes)))), 0
            while count := reader.read([piece], offset, Borrowed()):
                offset += count
        return True
