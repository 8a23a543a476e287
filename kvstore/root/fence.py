"""The folder of one sweep as a fence: as long as it exists chunks may be renamed into it, afterwards never again.

Here because both sides lift it: a collector at the end of its sweep, and a node before its first hold (rule C4), which
so stops collectors that etcd has forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root.interface import Root

ROUNDS_MAX = 100
"""A folder that is still filled after so many rounds belongs to a sweep that somebody else works on."""


def lift(root: Root, sweep: bytes, shard_bits: int, is_named: Callable[[], bool]) -> bool:
    """Ends the right to rename into the folder of a sweep that no condemned key names (rule F3); True when it is gone.

    What lies in it goes back: nobody knows any more that it was condemned.  ``is_named`` reads etcd again, because a
    folder that is not empty was condemned once, by now perhaps in a key that we have not seen.

    Raises the root's errors, and what ``is_named`` raises.
    """
    folder = places.trash_folder(sweep)
    for _ in range(ROUNDS_MAX):
        if root.remove_folder(folder, durable=True):
            return True
        if is_named():
            return False
        for entry in list(root.list(folder)):
            restore(root, Name(f"{folder}/{entry.name}"), shard_bits)
    return False


def restore(root: Root, entry: Name, shard_bits: int) -> bool:
    """Puts an entry of the trash back under its chunk's name, unless that is taken by a newer one (rule G5).

    True when it is back. What is no chunk of ours is deleted: only this protocol writes there.
    """
    found = places.parse_trashed(entry.rpartition("/")[2])
    if found is None:
        root.remove(entry)
        return False
    return root.publish(entry, places.chunk(*found, shard_bits), durable=False)
