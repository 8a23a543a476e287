"""The default bound of an embedded root, in the file ``bound`` beside ``FORMAT``: made once, for all processes.

On the root and not in the metadata, because it must outlive these: a root whose metadata were lost and adopted again is
not to be bounded by another free space. An operator may write another number into the file, or remove it.
"""

from __future__ import annotations

import json

from kvstore.errors import Overloaded, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.parsing import parse_json
from kvstore.root.identity import publish_small, read_small
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids

FREE_SHARE = 0.5
"""The share of the space that was free. Half leaves other programs as much as the cache, and several roots on one disk
never fill it: each takes half of what the others left."""
BOUND_BYTES_MIN = 64 << 20
"""A disk that was full at that moment would else refuse every put, also once it has room."""
RECORD_BYTES_MAX = 4096


def default_bound(root: Root, *, ids: Ids, clock: Clock) -> int | None:
    """Returns the bytes that the root's files may take by default; chosen and kept at the first call for a root.

    None if the root does not know its free space. Raises RootMismatch for a file that cannot be read, and the root's
    errors.
    """
    found = _read(root)
    if found is not None:
        return found
    free_bytes = root.space().free_bytes
    if free_bytes is None:
        return None
    chosen = max(BOUND_BYTES_MIN, int(FREE_SHARE * free_bytes))
    try:
        publish_small(root, places.BOUND, json.dumps({"max_bytes": chosen}).encode() + b"\n", ids=ids, clock=clock)
    except Overloaded:
        return chosen  # the disk is full, and what is stored can still be read
    found = _read(root)  # perhaps another process's, which was first
    if found is None:
        raise Unavailable(f"{root.url}: {places.BOUND} was written and is not there: check the mount")
    return found


def _read(root: Root) -> int | None:
    content = read_small(root, places.BOUND, RECORD_BYTES_MAX)
    if content is None:
        return None
    try:
        max_bytes = parse_json(content)["max_bytes"]
    except (ValueError, KeyError, TypeError):
        max_bytes = None
    if type(max_bytes) is not int or max_bytes < 1:
        raise RootMismatch(
            f'{root.url}: the file {places.BOUND} begins with {content[:60]!r}, expected {{"max_bytes": BYTES}}: '
            "correct it, or remove it for a new default"
        )
    return max_bytes
