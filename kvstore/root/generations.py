"""The root's side of generations: one small file each, first writer wins, the highest number is the current one.

These are files, not a field of ``FORMAT``, which never changes, so that nobody rewrites a file that others are reading.
"""

from __future__ import annotations

from kvstore.errors import RootMismatch
from kvstore.format import places
from kvstore.format.generation import RECORD_BYTES_MAX, Generation
from kvstore.format.places import GENERATIONS
from kvstore.root.identity import publish_small, read_small
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids


def newest_number(root: Root) -> int:
    """Returns the number of the newest generation, whether or not its file can be read; 0 if there is none."""
    numbers = (places.parse_generation(entry.name) for entry in root.list(GENERATIONS) if entry.stat)
    return max((number for number in numbers if number is not None), default=0)


def read_newest(root: Root) -> Generation | None:
    """Returns the newest generation; None if there is none. Raises RootMismatch if its file cannot be read."""
    number = newest_number(root)
    if not number:
        return None
    name = places.generation(number)
    content = read_small(root, name, RECORD_BYTES_MAX)
    found = Generation.from_json(b"" if content is None else content, f"{name} on the root")
    if found.number != number:
        raise RootMismatch(f"{name} on the root is the record of generation {found.number}: its file was renamed")
    return found


def publish(root: Root, generation: Generation, *, ids: Ids, clock: Clock) -> Generation:
    """Publishes a generation unless its number is taken, synced; returns the newest one, which may be another writer's.

    Raises RootMismatch if that cannot be read, and the root's errors.
    """
    publish_small(root, places.generation(generation.number), generation.to_json(), ids=ids, clock=clock)
    newest = read_newest(root)
    assert newest is not None, "published a moment ago, and generations are never deleted"
    return newest
