"""Files of ours that take room beside the chunks: staged, in a sweep's trash, set aside as damaged.

Apart from the survey of chunks, which they are no part of, and from those who remove them in time.
"""

from __future__ import annotations

from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root.interface import Root
from kvstore_gc.histogram import Tally


def beside(root: Root) -> Tally:
    """How many there are, and their bytes. Raises the root's errors.

    Call it before the chunks are listed: what is published or put back meanwhile then counts twice, never not at all.
    """
    found = _files(root, places.QUARANTINE)
    for above in (places.STAGING, places.TRASH):
        for entry in list(root.list(above)):
            if entry.stat is None:
                found += _files(root, Name(f"{above}/{entry.name}"))
            else:
                found += Tally(1, entry.stat.size_bytes)
    return found


def _files(root: Root, folder: Name) -> Tally:
    count = size_bytes = 0
    for entry in root.list(folder):
        if entry.stat is not None:
            count += 1
            size_bytes += entry.stat.size_bytes
    return Tally(count, size_bytes)
