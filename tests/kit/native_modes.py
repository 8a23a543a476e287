"""A store with the native data path and one without it, for tests that compare them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.client.local import LocalPort
from kvstore.client.store import Store
from kvstore.node.chunks import Chunks
from kvstore.node.limits import Limits
from kvstore.root.posix import PosixRoot
from tests.kit.stores import member_of, member_on


class PlainRoot(PosixRoot):
    """A root whose files have to be asked for one by one: everything is done in Python."""


@contextmanager
def opened(path: Path, *, native: bool, limits: Limits | None = None, direct: bool = False) -> Iterator[Store]:
    """A store on ``path``, with the native data path or without."""
    root = PosixRoot(path, direct=direct) if native else PlainRoot(path)
    assert (root.local_files is not None) == native
    store = Store(LocalPort(member_on(root, limits)))
    try:
        yield store
    finally:
        store.close()


def chunks_of(store: Store) -> Chunks:
    """The chunks of the node behind a store."""
    return member_of(store).node._chunks
