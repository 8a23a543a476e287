"""The folder of one sweep as a fence: chunks can be renamed into it while it exists, and never again afterwards.

Here because both sides lift it: a collector at the end of its sweep, and a node before its first hold (rule C4), which
stops collectors that etcd has forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from functools import partial

from kvstore.errors import Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root.interface import Root

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
