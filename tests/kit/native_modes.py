"""A store with the native data path and one without it, for tests that compare them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.engine.chunk_store import ChunkStore
from kvstore.engine.settings import Limits
from kvstore.format.places import HOST
from kvstore.root.posix import PosixRoot
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import member_of, member_on


class PlainRoot(PosixRoot):
    """A root whose files have to be asked for one by one: everything is done in Python."""


@contextmanager
def opened(path: Path, *, native: bool, limits: Limits | None = None, direct: bool = False) -> Iterator[Store]:
    """A store on ``path``, with the native data path or without."""
    root = PosixRoot(path, direct=direct) if native else PlainRoot(path)
    assert (root.local_files is not None) == native
    store = Store(LocalTransport(member_on(root, limits)))
    try:
        yield store
    finally:
        store.close()


def chunks_of(store: Store) -> ChunkStore:
    """The chunks of the node behind a store."""
    return member_of(store).node.store


class Paused:
    """The library with one call that stands still when it is reached, like a mount that hangs."""

    def __init__(self, library: object, name: str) -> None:
        self._library = library
        self._name = name
        self.reached, self.release = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        found = getattr(self._library, name)
        if name != self._name:
            return found

        def slow(*arguments: object) -> object:
            self.reached.set()
            assert self.release.wait(PATIENCE_S)
            return found(*arguments)

        return slow


def open_files(root: Path) -> int:
    """Returns the open files of that root's chunks: other threads have other files open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            file = os.readlink(f"/proc/self/fd/{fd}")
            found += file.startswith(f"{root}/") and not file.startswith((f"{root}/{HOST}/", f"{root}/FORMAT"))
    return found
