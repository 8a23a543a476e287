"""How much each namespace has on a root, counted by listing it: names carry the namespace, so no file is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvstore.cli.rooted import open_existing
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.namespace import NamespaceId


def usage_by_namespace(
    url: str, options: Mapping[str, Any], counted: Callable[[int], object]
) -> dict[NamespaceId, tuple[int, int]]:
    """Chunks and bytes (headers included) by namespace id. ``counted`` is called with every file or so.

    A chunk that is written or deleted meanwhile may be counted or not. Raises the root's errors.
    """
    found: dict[NamespaceId, tuple[int, int]] = {}
    root = open_existing(url, options)
    try:
        for folder in root.list(places.CHUNKS):
            if folder.stat is not None:
                continue
            files = 0
            for entry in root.list(Name(f"{places.CHUNKS}/{folder.name}")):
                parsed = places.parse_chunk(entry.name)
                if parsed is None or entry.stat is None:
                    continue
                chunks, size_bytes = found.get(parsed[1], (0, 0))
                found[parsed[1]] = (chunks + 1, size_bytes + entry.stat.size_bytes)
                files += 1
            counted(files)
    finally:
        root.close()
    return found
