"""Fences of sweeps, the reserve for a full disk, and the other small files and folders of a root."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import TypeVar

from kvstore.core.clock import Clock, Ids
from kvstore.errors import KVStoreError, StoreFull, Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root.identity import publish_small, read_small
from kvstore.root.interface import Root

# The folder of one sweep as a fence: chunks can be renamed into it while it exists, and never again afterwards.
#
# A collector lifts it at the end of its sweep, and a node before its first hold (rule C4), which stops collectors that
# etcd has forgotten.


log = logging.getLogger(__name__)

ROUNDS_MAX = 100
"""A folder that is still filled after so many rounds belongs to a sweep that another process works on."""


def lift(root: Root, sweep: bytes, shard_bits: int, is_named: Callable[[], bool]) -> bool:
    """Ends the right to rename into the folder of a sweep that no condemned key names (rule F3); True when it is gone.

    Its entries go back, because no record says any more that they were condemned. ``is_named`` reads etcd again: a
    folder that is not empty was condemned once, perhaps by now in a key that we have not seen.

    Raises the root's errors, and what ``is_named`` raises.
    """
    folder = places.trash_folder(sweep)
    for _ in range(ROUNDS_MAX):
        if is_named():
            return False
        if root.remove_folder(folder, durable=True):
            return True
        if is_named():
            return False
        for entry in list(root.list(folder)):
            name = Name(f"{folder}/{entry.name}")
            # A link counts as a file when listed, and as missing when looked at.
            if entry.stat is None or places.parse_trashed(entry.name) is None or root.stat(name) is None:
                put_aside(root, name)
            else:
                restore(root, name, shard_bits)
    return False


def lift_unnamed(root: Root, shard_bits: int, named: Callable[[], Set[bytes]]) -> int:
    """Lifts the fence of every trash folder whose sweep is not in ``named()`` (rule F3); returns how many.

    ``named`` reads the sweeps in flight from etcd. Raises the root's errors, and what ``named`` raises.
    """
    folders = {sweep for entry in root.list(places.TRASH) if (sweep := places.parse_sweep(entry.name)) is not None}
    if not folders:
        return 0

    def is_named(sweep: bytes) -> bool:
        return sweep in named()

    return sum(lift(root, sweep, shard_bits, partial(is_named, sweep)) for sweep in sorted(folders - named()))


def put_aside(root: Root, entry: Name) -> None:
    """Moves a foreign entry out of a trash folder, which could never be lifted otherwise.

    It is not deleted: its owner may want it. Raises the root's errors.
    """
    _, sweep, name = entry.rsplit("/", 2)
    log.warning("trash.foreign %s: set aside in quarantine/", entry)
    root.move(entry, Name(f"{places.QUARANTINE}/foreign.{sweep}.{name}"))


def restore(root: Root, entry: Name, shard_bits: int) -> bool:
    """Puts an entry of the trash back under its chunk's name, unless a newer chunk has the name (rule G5).

    True when it is back.
    """
    found = places.parse_trashed(entry.rpartition("/")[2])
    assert found is not None, "foreign entries are put aside first"
    try:
        return root.publish(entry, places.chunk(*found, shard_bits), durable=False)
    except Unavailable:
        if root.stat(entry) is not None:
            raise
        return False  # another process has put it back at the same moment


# A small reserve on the root, so that chunks can still be deleted when the disk is full.
#
# A sweep writes a plan and a folder before it deletes anything, and a clear on one host informs other processes first.
# On a full disk neither could begin. The first node of a folder makes the reserve, because the disk may fill up before
# any collector runs; collectors make it again.


T = TypeVar("T")

RESERVE_BYTES = 1 << 20
FREE_SHARE = 1 / 16
"""A node takes no more of what is free; a disk too small for RESERVE_BYTES_MIN has none."""
RESERVE_BYTES_MIN = 256 << 10


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


def with_reserve(root: Root, work: Callable[[], T]) -> T:
    """Returns what ``work`` returns. If that fails on a full disk, spends the reserve and tries once more."""
    try:
        return work()
    except StoreFull:
        if not root.remove(places.RESERVE):
            raise
        return work()


# Deletes a folder with all its content, for scratch folders of our own. Nothing else is ever deleted that way.


DEPTH_MAX = 4


def remove_tree(root: Root, folder: Name, depth_max: int = DEPTH_MAX) -> bool:
    """Deletes a folder, whose folders may be ``depth_max`` deep; False if something was left.

    Raises the root's errors. Follows no links: a link to a folder elsewhere is a file here.
    """
    if depth_max < 0:
        return False
    for entry in list(root.list(folder)):
        name = Name(f"{folder}/{entry.name}")
        if entry.stat is None:
            remove_tree(root, name, depth_max - 1)
        else:
            root.remove(name)
    return root.remove_folder(folder)


# Pin twins: each pin's record a second time, on the root, so that pins outlive the loss of etcd (rule C5).
#
# The content is opaque here: it belongs to the metadata, which roots do not know. A twin is written before its key
# and removed after it, so a twin without a key protects for longer than asked, never shorter.


TWIN_BYTES_MAX = 1_500_000
"""The most that etcd takes of one pin."""


def write_twin(root: Root, owner: str, pin: bytes, content: bytes, *, ids: Ids, clock: Clock) -> None:
    """Writes and syncs the twin of a new pin, whose id is unused. Raises the root's errors."""
    name = places.twin(owner, pin)
    if (
        not publish_small(root, name, content, ids=ids, clock=clock)
        and read_small(root, name, TWIN_BYTES_MAX) != content
    ):
        raise Unavailable(f"{name} could not be written")  # ids are unused: else it is ours, and the reply was lost


def remove_twin(root: Root, owner: str, pin: bytes) -> bool:
    """Removes a twin; False if there was none. Raises the root's errors."""
    name = places.twin(owner, pin)
    removed = root.remove(name)
    if removed:
        # Owners are often hosts or processes that never come back: their folders must not pile up.
        root.remove_folder(Name(name.rpartition("/")[0]))
    return removed


def list_twins(root: Root) -> Iterator[Name]:
    """Yields the names of all twins, in no order; a twin's content never changes under its name. Raises the root's
    errors.

    An entry in the place of an owner's folder that is not a folder counts as a twin: it may be a link to twins, which
    is not followed.
    """
    for owner in root.list(places.PINS):
        folder = Name(f"{places.PINS}/{owner.name}")
        if owner.stat is not None:
            yield folder
            continue
        for entry in root.list(folder):
            if places.parse_twin(entry.name) is not None:
                yield Name(f"{folder}/{entry.name}")


def read_twin(root: Root, name: Name) -> bytes | None:
    """Returns a twin's content; None if it is gone. At most TWIN_BYTES_MAX + 1 bytes. Raises the root's errors."""
    return read_small(root, name, TWIN_BYTES_MAX)
