"""Whether the metadata in a file on the root are lost: gone, damaged, or another generation's than the root's."""

from __future__ import annotations

import os
from contextlib import closing

from kvstore.errors import RootMismatch
from kvstore.format.places import HOST_GENERATIONS, METADATA
from kvstore.meta.generation import ADVICE_OF_HOST, difference, read_generation
from kvstore.meta.keys import Keys
from kvstore.meta.sqlite.client import SqliteMeta
from kvstore.meta.sqlite.faults import DamagedMetadata
from kvstore.root.generations import newest_number, read_newest
from kvstore.root.posix import PosixRoot


def why_astray(root: PosixRoot, keys: Keys, timeout_s: float) -> str | None:
    """Returns why nobody can rely on the file until it was adopted; None if they can, or if no node was here yet.

    It is opened anew: a connection may know pages that are damaged by now. Raises Unavailable if nobody can tell.
    """
    if newest_number(root) or not newest_number(root, HOST_GENERATIONS):
        return None  # of a cluster, or no node was here yet
    path = os.path.join(root.path, METADATA)
    if not os.path.lexists(path):
        return f"{path} is gone: {ADVICE_OF_HOST}"
    if not os.path.isfile(path):
        return f"{path} is not a file: remove it, and run `kvstore fsck ROOT --adopt`"
    try:
        on_root = read_newest(root, HOST_GENERATIONS)
        with closing(SqliteMeta(root.path)) as meta:
            in_meta = read_generation(meta, keys, timeout_s)
    except RootMismatch as mismatch:
        return f"{mismatch}: run `kvstore fsck ROOT --adopt`"
    except DamagedMetadata as damage:
        return str(damage)
    return None if on_root is None or on_root == in_meta else difference(on_root, in_meta, of_host=True)
