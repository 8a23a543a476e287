"""The look-ups of one client whose read has not come: the read says so, and counts nowhere else.

A worker leaves the read that follows a look-up out of the hit ratio. It cannot do so for a look-up that another worker
counted: a read goes to another one if the first is busy or gone.
"""

from __future__ import annotations

import threading

import xxhash

from kvstore.namespace import Namespace
from kvstore.node.counters import LOOKED_MAX


class LookUps:
    """Look-ups that wait for their read, at most LOOKED_MAX: the oldest is forgotten first. Thread-safe.

    A prompt is known by its packed tokens, blocks by their packed keys. A read asks for all of them, or for those that
    the look-up found.
    """

    def __init__(self) -> None:
        self.is_needed = False
        """True while the client has several workers: a single one remembers by itself."""
        self._lock = threading.Lock()
        # Guarded by _lock, both. The oldest come first.
        self._waiting: dict[int, int] = {}
        """Number of look-ups by what they found; by what they asked for if that was nothing."""
        self._found: dict[int, int] = {}
        """What the last look-up found, by what it asked for, where that was more."""

    def add(self, namespace: Namespace, asked: bytes, found_bytes: int) -> None:
        """Notes a look-up that a worker counted; ``found_bytes`` is the size of the packed part that was found."""
        whole = _hash(namespace, asked)
        found = _hash(namespace, asked[:found_bytes]) if 0 < found_bytes < len(asked) else whole
        with self._lock:
            _renew(self._waiting, found, self._waiting.get(found, 0) + 1)
            if found == whole:
                self._found.pop(whole, None)
            else:
                _renew(self._found, whole, found)

    def take(self, namespace: Namespace, asked: bytes) -> bool:
        """Returns True if a read of this follows a look-up, which waits no longer."""
        whole = _hash(namespace, asked)
        with self._lock:
            found = self._found.pop(whole, whole)
            waiting = self._waiting.pop(found, 0)
            if waiting > 1:
                self._waiting[found] = waiting - 1
            return waiting > 0

    def forget(self, namespace: Namespace, asked: bytes) -> None:
        """Notes that this is put: what was missed and computed is not read."""
        whole = _hash(namespace, asked)
        with self._lock:
            self._waiting.pop(whole, None)


def _hash(namespace: Namespace, packed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(packed, seed=xxhash.xxh3_64_intdigest(namespace.digest))


def _renew(kept: dict[int, int], key: int, value: int) -> None:
    """Sets a value as the newest, and drops the oldest if there are too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > LOOKED_MAX:
        del kept[next(iter(kept))]
