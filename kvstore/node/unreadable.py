"""Chunk files that could not be read: retried, then set aside, so that the next put can repair them.

Separate from damage, which one look proves. A file that cannot be read (an I/O error, no permission) may be whole, and
the root may fail rather than the file. But a file that stays unreadable is a miss for ever, while its size tells every
put that the chunk is there. So from its first failed read on, a file is a *suspect*: nobody trusts its size, and each
look reads it. When it has failed often enough, while other files can be read, it is set aside like a damaged one.
Called on lanes only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice

from kvstore.address import Address
from kvstore.buffers import Borrowed
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.format.header import PAGE_BYTES
from kvstore.format.places import Name
from kvstore.root.interface import Root
from kvstore.sources import Clock

FAILED = (Unavailable, PermissionDenied)
"""The errors of a root for a file that is there and cannot be read."""
FAILURES_MAX = 3
"""Failed reads of one file after which it is set aside."""
SUSPECTS_MAX = 1024
"""Limit on remembered files; beyond it, the oldest are trusted again until their next failure."""
PROBED_MAX = 8
"""Other files read to tell whether the file or the root fails: more than half must be readable."""
FOLDERS_MAX = 64
"""Limit on shards listed to find them."""
UNWELL_S = 1.0
"""A root that failed this test is not tested again for so long."""
READ_BYTES = 1 << 20


class Unreadable:
    """The suspects of one node. Thread-safe."""

    def __init__(self, root: Root, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[Address, int] = OrderedDict()
        self._unwell_until_s = 0.0

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

        Otherwise raises the root's error: the root fails as a whole, or the file cannot even be moved. The file then
        stays, nobody can read it, and no put can repair it.
        """
        while True:
            try:
                self.read(name)
            except FAILED as error:
                if self.failed(address) < FAILURES_MAX:
                    continue
                if not self._is_root_well(name):
                    raise
                try:
                    set_aside()
                except FAILED as why:
                    raise type(why)(
                        f"{name} cannot be read ({error}) and cannot be set aside ({why}): mend its permissions, "
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

    def _is_root_well(self, name: Name) -> bool:
        """True if most other files can be read at this moment."""
        if self._clock.monotonic_s() < self._unwell_until_s:
            return False
        others = [*islice(self._others(name), PROBED_MAX)] or [places.FORMAT]
        if 2 * sum(map(self._is_readable, others)) > len(others):
            return True
        self._unwell_until_s = self._clock.monotonic_s() + UNWELL_S
        return False

    def _is_readable(self, name: Name) -> bool:
        try:
            reader = self._root.open(name)
            if reader is not None:
                with reader:
                    reader.read([memoryview(bytearray(PAGE_BYTES))], 0, Borrowed())
        except KVStoreError:
            return False
        return True

    def _others(self, name: Name) -> Iterator[Name]:
        """Yields other chunk files: of the same shard, then of some more."""
        own = Name(name.rpartition("/")[0])
        shards = (Name(f"{places.CHUNKS}/{each}") for each in self._listed(places.CHUNKS, folders=True))
        for folder in chain([own], islice((each for each in shards if each != own), FOLDERS_MAX)):
            for file_name in self._listed(folder, folders=False):
                if f"{folder}/{file_name}" != name and places.parse_chunk(file_name) is not None:
                    yield Name(f"{folder}/{file_name}")

    def _listed(self, folder: Name, *, folders: bool) -> Iterator[str]:
        """Yields the names in a folder, up to where listing fails."""
        try:
            for entry in self._root.list(folder):
                if (entry.stat is None) is folders:
                    yield entry.name
        except KVStoreError:
            return
