"""The root's side of generations: one small file each, first writer wins, the highest number is the current one.

These are files, not a field of ``FORMAT``, which never changes, so that nobody rewrites a file that others are reading.
The metadata of one host, in a file on the root, have a folder of their own: a cluster may take over such a root, and
from then on its generations count.
"""

from __future__ import annotations

from kvstore.errors import RootMismatch
from kvstore.format import places
from kvstore.format.generation import RECORD_BYTES_MAX, Generation, OfCluster
from kvstore.format.places import GENERATIONS, HOST_GENERATIONS, Name
from kvstore.root.identity import publish_small, read_small
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids


def newest_number(root: Root, folder: Name = GENERATIONS) -> int:
    """Returns the number of the newest generation, whether or not its file can be read; 0 if there is none."""
    numbers = (places.parse_generation(entry.name) for entry in root.list(folder) if entry.stat)
    return max((number for number in numbers if number is not None), default=0)


def read_newest(root: Root, folder: Name = GENERATIONS) -> Generation | None:
    """Returns the newest generation; None if there is none.

    Raises RootMismatch if its file cannot be read, and for the generations of a host on a cluster's root.
    """
    if folder == HOST_GENERATIONS and newest_number(root):
        raise OfCluster(f"{root.url} belongs to a cluster, whose etcd knows who uses it: give --etcd")
    number = newest_number(root, folder)
    if not number:
        return None
    name = places.generation(number, folder)
    content = read_small(root, name, RECORD_BYTES_MAX)
    found = Generation.from_json(b"" if content is None else content, f"{name} on the root")
    if found.number != number:
        raise RootMismatch(f"{name} on the root is the record of generation {found.number}: its file was renamed")
    return found


def publish(root: Root, generation: Generation, *, ids: Ids, clock: Clock, folder: Name = GENERATIONS) -> Generation:
    """Publishes a generation unless its number is taken, synced; returns the newest one, which may be another writer's.

    Raises RootMismatch if that cannot be read, and the root's errors.
    """
    publish_small(root, places.generation(generation.number, folder), generation.to_json(), ids=ids, clock=clock)
    newest = read_newest(root, folder)
    assert newest is not None, "published a moment ago, and generations are never deleted"
    return newest
