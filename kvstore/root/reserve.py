"""A little room that is kept on the root, so that chunks can still be deleted when nobody can write any more.

A sweep needs a plan and a folder before it may delete anything, and metadata in a file on the root need a log. On a
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
SPENDING_NS = 1_000_000_000
"""The time of a reserve that is about to be spent."""
PUTS_END_S = 1.0
"""Time in which puts that found the disk full have ended."""
LOG_BYTES = 640 << 10
"""Room for the log of metadata in a file on the root, while a clear or a round of sweeps begins."""


def keep_reserve(root: Root, ids: Ids, size_bytes: int = RESERVE_BYTES) -> None:
    """Makes the file if it is missing and there is room. Raises nothing: everything goes on without it."""
    if not root.traits.fenced:
        return
    session = ids.fresh()
    staged = places.staged(session, 0)
    try:
        reserve = root.stat(places.RESERVE)
        if reserve is not None and reserve.mtime_ns == SPENDING_NS:
            root.touch(places.RESERVE, 0)  # who was about to spend it has not
        if reserve is None:
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


def make_room_late(root: Root, pause: Callable[[float], object]) -> bool:
    """Does what ``make_room`` does, PUTS_END_S later where that spends the reserve.

    Puts that have begun end on the full disk meanwhile, and do not take that room (rule S7). Raises what ``pause`` does
    too.
    """
    if begin_spending(root):
        pause(PUTS_END_S)
    return make_room(root)


def begin_spending(root: Root) -> bool:
    """Tells puts that the reserve is about to be spent, if ``make_room`` would do that now; returns whether it would.

    By the file's time, which needs no room. Raises the root's errors.
    """
    return not _has_room(root) and root.touch(places.RESERVE, SPENDING_NS)


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
