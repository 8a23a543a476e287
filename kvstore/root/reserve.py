"""A little room that is kept on the root, so that chunks can still be deleted when nobody can write any more.

A sweep needs a plan and a folder before it may delete anything, and a clear on one host tells others first. On a
full disk neither could begin. The first node of a folder makes the reserve, because the disk may be full before any
collector was there; collectors make it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.root.interface import Root
from kvstore.root.posix_errors import DiskFull
from kvstore.sources import Ids

T = TypeVar("T")

RESERVE_BYTES = 1 << 20
FREE_SHARE = 1 / 16
"""A node takes no more of what is free; a disk too small for RESERVE_BYTES_MIN has none."""
RESERVE_BYTES_MIN = 256 << 10
LOG_BYTES = 640 << 10
"""Room for what is written while a clear or a sweep begins."""


def keep_reserve(root: Root, ids: Ids, size_bytes: int = RESERVE_BYTES) -> None:
    """Makes the file if it is missing and there is room. Raises nothing: everything goes on without it."""
    if not root.traits.fenced:
        return
    session = ids.fresh()
    staged = places.staged(session, 0)
    try:
        if root.stat(places.RESERVE) is None:
            root.stage(staged, [memoryview(bytes(size_bytes))], stamp_ns=0, durable=False)
            root.publish(staged, places.RESERVE, durable=False)
    except KVStoreError:
        pass  # full, or not answering: the next collector tries again
    finally:
        try:
            root.discard(staged)
            root.remove_folder(places.staging_folder(session))
        except KVStoreError:
            pass  # the orphans of a later round


def begin_reserve(root: Root, ids: Ids) -> None:
    """Makes the file for a new root, smaller on a small disk. Raises Unavailable if the disk does not answer."""
    if root.stat(places.RESERVE) is None:
        size_bytes = min(RESERVE_BYTES, int(FREE_SHARE * (root.space().free_bytes or 0)))
        if size_bytes >= RESERVE_BYTES_MIN:
            keep_reserve(root, ids, size_bytes)


def spend_reserve(root: Root) -> bool:
    """Gives its room back to the root; False if it was spent before. Raises the root's errors."""
    return root.remove(places.RESERVE)


def make_room(root: Root) -> bool:
    """Spends the reserve if a full disk has no room for what deleting writes first; True if there is room now.

    Raises the root's errors.
    """
    return _has_room(root) or (spend_reserve(root) and _has_room(root))


def _has_room(root: Root) -> bool:
    free_bytes = root.space().free_bytes
    return free_bytes is None or free_bytes >= LOG_BYTES


def with_reserve(root: Root, work: Callable[[], T]) -> T:
    """Returns what ``work`` returns. If that fails on a full disk, spends the reserve and tries once more."""
    try:
        return work()
    except DiskFull:
        free_bytes = root.space().free_bytes
        if free_bytes is None or free_bytes >= RESERVE_BYTES or not spend_reserve(root):
            raise
        return work()
