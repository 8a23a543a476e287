"""Counts what the files of a root take, where no collector does it."""

from __future__ import annotations

from kvstore.format.places import CHUNKS, QUARANTINE, STAGING, TRASH, Name
from kvstore.root.interface import Root


def used_bytes(root: Root) -> int:
    """Returns the bytes of its chunks, and of what is staged, in a sweep's trash or set aside.

    In this order a file that is published, or put back, meanwhile counts twice, never not at all. Raises the root's
    errors.
    """
    return sum(_bytes_in(root, folder) for folder in (QUARANTINE, STAGING, TRASH, CHUNKS))


def _bytes_in(root: Root, folder: Name) -> int:
    found = 0
    for entry in root.list(folder):
        found += _bytes_in(root, Name(f"{folder}/{entry.name}")) if entry.stat is None else entry.stat.size_bytes
    return found
