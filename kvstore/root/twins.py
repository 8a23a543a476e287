"""Pin twins: each pin's record a second time, on the root, so that pins outlive the loss of etcd (rule C5).

The content is opaque here: it belongs to the metadata, which roots do not know. A twin is written before its key and
removed after it, so a twin without a key protects for longer than asked, never shorter.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root.identity import publish_small, read_small
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids

TWIN_BYTES_MAX = 1_500_000
"""The most that etcd takes of one pin."""


def write_twin(root: Root, owner: str, pin: bytes, content: bytes, *, ids: Ids, clock: Clock) -> None:
    """Writes and syncs the twin of a new pin, whose id nobody used before. Raises the root's errors."""
    won = publish_small(root, places.twin(owner, pin), content, ids=ids, clock=clock)
    assert won, "pin ids are never used again"


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
